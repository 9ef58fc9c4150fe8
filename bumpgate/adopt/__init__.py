"""Adopts a candidate that passed its gate as the set of a lane, and undoes an adoption."""
