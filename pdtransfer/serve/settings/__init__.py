"""Settings and flags: their bounds, and how a child process gets them."""
