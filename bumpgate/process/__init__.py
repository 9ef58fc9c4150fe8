"""Runs of a suite in another interpreter, and their ends."""
