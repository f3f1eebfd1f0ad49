"""What each process needs besides its work: signals, logs, HTTP, and other processes that it starts."""
