"""Whole runs: configuration, workers, the training loop, run folders, resuming, comparing, simulating."""
