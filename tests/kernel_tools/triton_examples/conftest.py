"""Triton is not on every platform: only the tests that need these modules import them."""

collect_ignore_glob = ["*.py"]
