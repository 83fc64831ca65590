"""LUCID's solve on a backend's kernels: which calls they support, and their residuals."""

from __future__ import annotations

from collections.abc import Mapping

from precondattn.backend import ArraySpec, Request
from precondattn.kernel_backend.limits import MOST_HEADS
from precondattn.spec.lucid import LucidSolve
from precondattn.spec.metric import DOT

WIDEST_KEYS, WIDEST_VALUES = 256, 512


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
