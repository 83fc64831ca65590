"""The output of each leaf in operations that JAX can differentiate any number of times.

Memory stays linear in the number of tokens. Blocked algorithms run in the loops of `loops.py`, and
a solve is differentiated as a solve (`lower_system.py`). Leaves whose definition is linear in
memory are computed by it, and so are packed calls of leaves that sum over whole sequences.
"""

from __future__ import annotations

from copy import copy
from typing import TypeVar

import jax
from jax import Array

from precondattn.algebra.leaf_protocol import LeafProtocol
from precondattn.arrays import Arrays
from precondattn.frame import Frame
from precondattn_jax.loops import DIFFERENTIABLE, PLAIN, Loops
from precondattn_portable.algorithm import Algorithm

L = TypeVar("L", bound=LeafProtocol)


class AlgorithmInLoops(Algorithm[L]):
    """An algorithm whose operations can all be differentiated, if its loops can."""

    loops: Loops = PLAIN

    def output(self, x: Arrays, frame: Frame) -> Array:
        """The output, in operations that JAX can differentiate any number of times."""
        differentiable = copy(self)
        differentiable.loops = DIFFERENTIABLE
        return differentiable.forward(x, frame)[0]

    def output_as_defined(self, x: Arrays, frame: Frame) -> Array:
        return jax.checkpoint(lambda x: self.leaf.forward(x, frame)[0])(x)
