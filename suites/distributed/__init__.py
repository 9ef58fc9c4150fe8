"""Two ranks compute what one process computes alone, or end with a reason."""
