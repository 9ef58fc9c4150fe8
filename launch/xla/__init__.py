"""Training on XLA and TPUs: steps, environment, sharding, memory."""
