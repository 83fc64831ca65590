"""Faults of LUCID's solve without causality, of its definition and of its iteration."""

from __future__ import annotations

from typing import Any

from precondattn.arrays import namespace
from precondattn.frame import Frame
from precondattn.spec import symmetric_lucid
from precondattn.spec.array_functions import transpose
from precondattn.spec.symmetric_lucid import SymmetricLucidSolve
from precondattn_conformance.faults.fault import BACKWARD, FORWARD, Fault, inside
from precondattn_conformance.faults.written_by_hand.written import blocked, written
from precondattn_portable import block_conjugate_gradients
from precondattn_portable import symmetric_lucid as iterated
from precondattn_portable.symmetric_lucid import Similarities

BOTH = (FORWARD, BACKWARD)
SOLVE = "symmetric_lucid_solve"
RHO = "symmetric_lucid_solve[rho=0.1,scale=0.3,eps=0]"


def faults() -> list[Fault]:
    """All faults in this file."""
    return [*_of_the_definition(), *_of_the_iteration()]


def _of_the_definition() -> list[Fault]:
    return [
        written(
            SOLVE,
            BOTH,
            "earlier tokens only, as with causality",
            inside(Frame, "visible", lambda true: _causal(true)),
        ),
        written(
            RHO,
            BOTH,
            "ρ added twice",
            inside(SymmetricLucidSolve, "solved", lambda _: _with_two_rho),
        ),
        written(
            SOLVE,
            BOTH,
            "the inverse to first order",
            inside(symmetric_lucid, "solve_positive", lambda _: _first_order),
        ),
        written(
            SOLVE,
            BACKWARD,
            "the norm of the keys constant to the gradient",
            inside(symmetric_lucid, "rms_norm_vjp", lambda _: _of_constant_norm),
        ),
        written(
            SOLVE,
            BACKWARD,
            "the scores' gradient to one of both keys",
            inside(symmetric_lucid, "transpose", lambda _: _of_rows_alone),
        ),
    ]


def _causal(true: Any) -> Any:
    def visible(self: Frame, *, causal: bool, **rest: Any) -> Any:
        return true(self, causal=True, **rest)

    return visible


def _with_two_rho(self: SymmetricLucidSolve, similarities: Any, right: Any) -> Any:
    one = symmetric_lucid.identity_like(similarities)
    return symmetric_lucid.solve_positive(similarities + (1.0 + 2 * self.rho) * one, right)


def _first_order(matrix: Any, right: Any) -> Any:
    own = namespace(matrix).linalg.diagonal(matrix)[..., None]
    return right / own - (matrix @ (right / own) - right) / own


def _of_constant_norm(k: Any, eps: float, d_unit: Any) -> Any:
    return d_unit / symmetric_lucid.rms(k, eps)


def _of_rows_alone(x: Any) -> Any:
    """The transpose of keys and values, and 0 in place of that of a square matrix."""
    return x * 0 if x.shape[-1] == x.shape[-2] else transpose(x)


def _of_the_iteration() -> list[Fault]:
    return [
        blocked(
            SOLVE,
            BOTH,
            "two digits of the solution",
            iterated,
            "tolerance_of",
            lambda _: lambda leaf, x: 1e-2,
        ),
        blocked(
            SOLVE,
            BOTH,
            "the residual not examined",
            block_conjugate_gradients.Residual,
            "is_large",
            lambda _: lambda self: self.length < 0,
        ),
        blocked(
            SOLVE,
            BACKWARD,
            "the gradient of the diagonal, which is constant",
            Similarities,
            "tile",
            _with_diagonal,
        ),
    ]


def _with_diagonal(true: Any) -> Any:
    def tile(self: Similarities, i0: int, i1: int, low: int, own: float) -> Any:
        return true(self, i0, i1, low, own or 1.0 / self.factor)

    return tile
