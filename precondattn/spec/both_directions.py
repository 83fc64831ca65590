"""The leaf of bidirectional recurrences: both directions, with each token itself counted once.

    sum:     o = → + ← − own
    concat:  o = [→, ← − own]

→ is the output of a recurrence, ← that of the same recurrence from the last token to the first, and
own what a token alone gives (`own_token.py`). For S→ and S← the states before and after token t in
time, a step that is affine in the state, S ↦ A_t S + B_t, and a linear read C_t,

    → + ← − own = C_t (A_t S→ + B_t) + C_t (A_t S← + B_t) − C_t B_t = C_t (A_t (S→ + S←) + B_t),

which is one step from the sum of the two states, and ← − own = C_t A_t S←. Gradient of the sum: do,
do and −do; of the two halves d₁ and d₂: d₁, d₂ and −d₂.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from precondattn.algebra import Inputs, TokenWise, options
from precondattn.arrays import Array, Arrays, ByName, Residuals, fresh, namespace
from precondattn.frame import Frame


@dataclass(frozen=True)
class BothDirections(TokenWise):
    """forward + backward − own, or forward and backward − own side by side.

    Parameters
    ----------
    combine : {"sum", "concat"}
        Whether the two are added, or side by side, in twice the channels.

    Examples
    --------
    >>> import numpy as np
    >>> one = np.ones((1, 1, 1, 2))
    >>> BothDirections()(3 * one, 2 * one, one).ravel()
    array([4., 4.])
    >>> BothDirections("concat")(3 * one, 2 * one, one).ravel()
    array([3., 3., 1., 1.])
    """

    name: ClassVar[str] = "both_directions"
    variants: ClassVar[tuple[str, ...]] = ("both_directions[combine=concat]",)
    combine: str = options.choice("sum", "concat")

    inputs = Inputs(forward="b t h e", backward="b t h e", own="b t h e")

    @property
    def output(self) -> str:  # type: ignore[override]
        return "b t h e" if self.combine == "sum" else "b t h 2*e"

    def forward(self, x: ByName, frame: Frame) -> tuple[Array, Residuals]:
        later = x["backward"] - x["own"]
        if self.combine == "sum":
            return x["forward"] + later, ()
        return namespace(later).concat([x["forward"], later], axis=-1), ()

    def backward(
        self, x: ByName, frame: Frame, out: Array, residuals: Residuals, cotangent: Array
    ) -> Arrays:
        e = x["own"].shape[-1]
        both = self.combine == "sum"
        d_later = cotangent if both else cotangent[..., e:]
        return {
            "forward": fresh(cotangent if both else cotangent[..., :e]),
            "backward": fresh(d_later),
            "own": -d_later,
        }
