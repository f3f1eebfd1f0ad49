"""The daemons, the router, and the commands that run and watch them: `pip install '.[daemons]'`."""
