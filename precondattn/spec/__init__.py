"""The oracle: the mathematics of every mechanism, and nothing else.

One file a leaf. A file opens with the equation and its source; the code below looks like the
equation. Everything is written in functions of the array-API standard, in float32 or float64, and
is quadratic where the definition is quadratic.
"""
