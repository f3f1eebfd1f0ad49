"""A worker that is several processes, one a rank: how they meet, what its leader orders, and what the others report."""
