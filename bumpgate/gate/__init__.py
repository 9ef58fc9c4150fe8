"""The gate: measures two environments in pairs and returns one verdict."""
