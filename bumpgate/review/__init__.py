"""Accepts what was measured: `bumpgate accept`, `rebaseline`, `adopt` and `rollback`."""
