"""What only a CUDA device can show; see `pytest -m gpu`."""
