"""Our own daemons behind a router: requests become rooms on two workers, over the bus."""
