"""Generators of document tables, and maintenance programs: `python -m tools.NAME`."""
