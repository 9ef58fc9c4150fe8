"""Checks of a machine and its environment before anything runs on it."""
