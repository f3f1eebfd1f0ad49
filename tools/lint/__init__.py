"""Rules of this tree that ruff and import-linter do not know: `python -m tools.lint` prints what breaks them."""
