"""Environments for a candidate: resolved, built by uv, kept by content, frozen and rolled back."""
