"""CUDA's headers are not everywhere: these modules are imported by the tests that need them."""

collect_ignore_glob = ["*.py"]
