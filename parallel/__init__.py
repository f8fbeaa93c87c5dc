"""Tensor parallelism that knows nothing of transformers."""
