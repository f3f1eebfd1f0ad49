"""Copies through a ring of slots in a GPU's memory: which rows, their works, and the lanes that queue them."""
