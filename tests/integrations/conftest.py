"""Modules of worker processes import packages of the extra `integrations`, and have no doctests."""

collect_ignore = ["adapted_process.py"]
