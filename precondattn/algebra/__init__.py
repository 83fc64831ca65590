"""The algebra: the declarations of mechanisms, and how mechanisms compose.

A leaf implements mathematics, and a preconditioner is a list of steps around a base
(`mechanism.py`). The steps are unfolded into a program of leaf calls (`unfolding.py`,
`program.py`). Output, gradient, cache and dispatch are derived from the program.
"""
