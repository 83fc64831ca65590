"""The modules of worker processes, which import packages of the extra `integrations`, have no doctests."""

collect_ignore = ["adapted_process.py"]
