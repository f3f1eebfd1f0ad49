"""Generates proto/v1 from the code: the schema, the tables in its README, and golden vectors, which are append-only.

`python -m tools.proto_generator` writes what is stale; with `--check` it only reports it, with status 1.
"""
