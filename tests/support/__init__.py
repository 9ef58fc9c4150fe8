"""What several tests use: fake indexes and builds, simulated machines, copies of the repository."""
