"""Execution of a call: it is checked, bound, planned, and passed to backends and autograd.

These modules, except `shorthand.py`, are imported by the first call (`algebra/verbs.py`).
"""
