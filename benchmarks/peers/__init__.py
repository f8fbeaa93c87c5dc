"""The contenders of benchmarks.compare: one file each, started in processes of their own by ``python -m benchmarks.peers``."""
