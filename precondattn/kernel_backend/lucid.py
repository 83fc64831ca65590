"""LUCID on a backend's kernels: its solve, and its decoding step.

The step is that of the group `y1 = lucid_solve(k, v); out = softmax(q, k, v=y1)`.
"""

from __future__ import annotations

from collections.abc import Mapping

from precondattn.algebra.piece import Piece
from precondattn.arrays import Array
from precondattn.backend import ArraySpec, Request
from precondattn.cache import Append, Updates
from precondattn.kernel_backend.limits import MOST_HEADS, padded_width
from precondattn.preconditioners.lucid import is_lucid
from precondattn.spec.lucid import LucidSolve
from precondattn.spec.metric import DOT
from precondattn.spec.softmax import Softmax

WIDEST_KEYS, WIDEST_VALUES = 256, 512
WIDEST = 256
LARGEST_TILE = 8192
"""The most elements of a tile of queries and the new key that fit on every GPU."""


class LucidSolveSupport:
    """The base class of kernels for `LucidSolve`, with a unit diagonal and without a window.

    The residual is ρ of `backward`, if there is an input β.
    """

    only_dot = True
    """Whether the metric must be the dot product."""

    def refuses(self, leaf: LucidSolve, request: Request) -> str | None:
        """The reason why the kernels do not support a full call; None if they do."""
        if self.only_dot and leaf.metric != DOT:
            return "its solve is for the dot product"
        if not leaf.has_unit_diagonal:
            return f"its solve has a unit diagonal, unlike normalize={leaf.normalize!r}"
        if leaf.window is not None:
            return "its solve has no window"
        shapes = dict(request.shapes)
        (b, _, n, d), e = shapes["k"], shapes["v"][3]
        if d > WIDEST_KEYS or e > WIDEST_VALUES:
            widest = f"d <= {WIDEST_KEYS} and e <= {WIDEST_VALUES}"
            return f"its solve supports {widest}; found d={d}, e={e}"
        if 0 in shapes["k"] + shapes["v"]:
            return "its solve supports no empty arrays"
        if b * n > MOST_HEADS:
            return f"its solve supports at most {MOST_HEADS} heads of all sequences together"
        return None

    def residual_shapes(
        self, leaf: LucidSolve, inputs: Mapping[str, ArraySpec]
    ) -> tuple[ArraySpec, ...]:
        return (ArraySpec(*inputs["v"]),) if leaf.beta else ()


def leaves_of(group: Piece) -> tuple[LucidSolve, Softmax]:
    solve, softmax = group.program.leaves
    assert isinstance(solve, LucidSolve)
    assert isinstance(softmax, Softmax)
    return solve, softmax


class LucidStepKernels:
    """The base class of kernels for one new token per sequence; a subclass defines `step`."""

    fitting = "as many query heads to a key/value head as fit a tile"

    def fits(self, rows: int, dtype: str, width: int) -> bool:
        """Whether the query heads of a key/value head and the new key fit in a tile."""
        rows = padded_width(rows)
        return rows <= (32 if dtype == "float32" else 64) and rows * width <= LARGEST_TILE

    def refuses(self, group: Piece, request: Request) -> str | None:
        """The reason why the kernels do not support a request; None if they do."""
        solve, softmax = leaves_of(group)
        if not is_lucid(group.program) or solve.window or softmax.window or not softmax.causal:
            return "its step is that of plain LUCID around causal softmax"
        shapes = dict(request.shapes)
        b, t, h, d = shapes["q"]
        n, e = shapes["v"][2:]
        if t != 1:
            return f"its step supports one token; found t={t}"
        if 0 in shapes["q"] + shapes["v"]:
            return "its step supports no empty arrays"
        if b * n > MOST_HEADS:
            return f"its step supports at most {MOST_HEADS} heads of all sequences together"
        width = padded_width(max(d, e))
        if width > WIDEST or not self.fits(h // n + 1, request.dtype, width):
            found = f"found d={d}, e={e} and {h // n}"
            return f"its step supports d, e <= {WIDEST}, and {self.fitting}; {found}"
        return None

    @staticmethod
    def updates(group: Piece, k: Array, y: Array, rms: Array | None) -> Updates:
        """The updates of the group's buffers with the new key, y, and rms(k) if that is cached."""
        solve, softmax = (call.slot_keys() for call in group.program.calls)
        new = {softmax["key"]: k, solve["key"]: k, solve["solved"]: y}
        if rms is not None:
            new[solve["rms"]] = rms
        return {key: Append(array) for key, array in new.items()}
