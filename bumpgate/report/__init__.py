"""Reports and the history of records and gates."""
