"""The history of gates and adoptions."""
