"""Recognising groups of leaf calls, for backends that compute them with one kernel."""

from __future__ import annotations

from functools import lru_cache
from typing import cast

from precondattn.algebra.program import Program
from precondattn.limits import KEPT
from precondattn.spec.lucid import LucidSolve
from precondattn.spec.metric import DOT
from precondattn.spec.read import MEAN
from precondattn.spec.softmax import Softmax


@lru_cache(maxsize=KEPT)
def is_lucid(program: Program) -> bool:
    """Whether a group is LUCID around softmax, with the dot product and the normalised keys."""
    if len(program.calls) != 2 or [*map(type, program.leaves)] != [LucidSolve, Softmax]:
        return False
    solve, softmax = cast("tuple[LucidSolve, Softmax]", program.leaves)
    has_supported_options = (
        solve.metric == DOT
        and solve.has_unit_diagonal
        and softmax.read == MEAN
        and softmax.forget == "none"
        and not softmax.bias
        and softmax.softcap is None
        and not softmax.sink
        and softmax.distance == "none"
    )
    first, second = (dict(call.arguments) for call in program.calls)
    is_wired_as_lucid = second["v"] == program.calls[0].out and first["k"] == second["k"]
    return has_supported_options and is_wired_as_lucid
