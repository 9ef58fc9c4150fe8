"""The bisection: the first bad version, then the package at fault."""
