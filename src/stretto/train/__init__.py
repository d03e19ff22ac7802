"""Runs: configuration, the training loop, local workers, comparisons."""
