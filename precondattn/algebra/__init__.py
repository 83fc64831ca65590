"""The algebra: what a mechanism declares, and how mechanisms compose.

A leaf owns mathematics and a preconditioner is a list of steps (`mechanism.py`). Steps are unfolded
to a program of leaf calls (`unfolding.py`, `program.py`), from which output, gradient, cache and
dispatch follow.
"""
