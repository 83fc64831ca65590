"""Execution: a user's call is checked, bound, planned, and passed to backends and autograd.

Imported by the first call (`algebra/verbs.py`), except `shorthand.py`.
"""
