"""Training over several ranks: process groups, parallel layouts, shards of checkpoints."""
