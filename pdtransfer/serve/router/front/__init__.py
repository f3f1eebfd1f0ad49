"""The HTTP side of every router: its listener, its clients and their keys, bodies, answers and documents."""
