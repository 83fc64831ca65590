"""The oracle: the mathematics of every mechanism, without optimisations.

A file has one leaf, or a few of one equation. It opens with the equation and its source, and the
code follows the equation. All code uses functions of the array-API standard, in float32 or float64,
and is quadratic where the definition is quadratic.
"""
