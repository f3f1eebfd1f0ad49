"""Programs of this repository that write or check its files; no part of the package."""
