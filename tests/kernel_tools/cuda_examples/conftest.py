"""CUDA's headers are not on every machine: only the tests that need these modules import them."""

collect_ignore_glob = ["*.py"]
