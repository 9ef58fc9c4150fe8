"""The gate: two environments measured in pairs, and one verdict."""
