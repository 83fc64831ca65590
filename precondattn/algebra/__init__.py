"""The algebra: what a mechanism declares, and how mechanisms compose.

A leaf implements mathematics and a preconditioner is a list of steps (`mechanism.py`). The steps
are unfolded into a program of leaf calls (`unfolding.py`, `program.py`). Output, gradient, cache
and dispatch are derived from the program.
"""
