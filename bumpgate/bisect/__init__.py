"""Bisection: finds the first bad version, then the package at fault."""
