"""Triton is not on every platform: these modules are imported by the tests that need them."""

collect_ignore_glob = ["*.py"]
