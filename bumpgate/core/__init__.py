"""Rows, baselines, findings and gate files: data and decisions, the standard library only."""
