"""Kernel wheels of a lane: which of them fit a torch, and where they come from."""
