"""What is shown of a record or a gate, and what is kept of it."""
