"""Who belongs to a router's fleet, what is known of each, and what changes it while the router runs."""
