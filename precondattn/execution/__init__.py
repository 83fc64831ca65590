"""Execution: a user's call is checked, bound, planned, and passed to backends and autograd.

Imported by the first call (`algebra/verbs.py`), except `build.py`, which the shorthands need.
"""
