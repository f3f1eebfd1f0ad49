"""A worker of several ranks: a leader and its followers take the same steps in the same order."""
