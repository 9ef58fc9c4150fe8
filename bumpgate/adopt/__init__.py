"""Making a candidate that passed its gate the adopted set of a lane, and undoing it."""
