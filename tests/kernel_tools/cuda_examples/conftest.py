"""CUDA's headers may be missing, so only the tests that need these modules import them."""

collect_ignore_glob = ["*.py"]
