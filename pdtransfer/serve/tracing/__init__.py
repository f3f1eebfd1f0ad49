"""Spans of what processes do, on disk and merged over processes."""
