"""Environments for a candidate: resolving, building by uv, caching by content, freezing and rollback."""
