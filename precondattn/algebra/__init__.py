"""The algebra: the declarations of mechanisms, and how mechanisms compose.

A leaf implements mathematics, and a preconditioner is a list of steps around a base
(`mechanism.py`). The steps are unfolded into a program of leaf calls (`unfolding.py`,
`program.py`). Output, gradient, cache and dispatch are derived from the program. Leaves and
preconditioners import the names below from here.
"""

from precondattn.algebra.declaration import Inputs, Pattern, ShapeError
from precondattn.algebra.flops import Flops
from precondattn.algebra.leaf_protocol import Offers
from precondattn.algebra.mechanism import (
    Leaf,
    Mechanism,
    Preconditioner,
    Step,
    TokenWise,
    step,
    with_base,
)
from precondattn.algebra.recurrence import Recurrence

__all__ = [
    "Flops",
    "Inputs",
    "Leaf",
    "Mechanism",
    "Offers",
    "Pattern",
    "Preconditioner",
    "Recurrence",
    "ShapeError",
    "Step",
    "TokenWise",
    "step",
    "with_base",
]
