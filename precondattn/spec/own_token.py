"""What a token reads of itself: the output of a recurrence for a sequence of this token alone.

    o_t = s (q_t·k_t) u_t,    u_t = v_t  (additive),    u_t = β_t v_t  (delta rule),

since the state before it is 0, from which nothing is erased and nothing decays. Keys of the gate
are 1 − e^g, RWKV-6 has u ∘ q in the place of q, and gated DeltaNet 2 has w ∘ v in that of v. The
gradient, with c = s q·k, is

    dc = u·do,    dq = s dc k,    dk = s dc q,    du = c do,    dβ = du·v,    dv = β du.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, cast

from precondattn.algebra import Inputs, TokenWise, options, registry
from precondattn.arrays import Array, Arrays, ByName, Residuals, namespace
from precondattn.frame import Frame
from precondattn.spec.array_functions import row_sum
from precondattn.spec.linear_family import (
    LinearFamily,
    queries_of_rows,
    queries_of_states,
    rows_of_states,
)
from precondattn.spec.recurrence import Stream
from precondattn.spec.rwkv6 import bonus_of
from precondattn.spec.several_steps import at_last, of_last
from precondattn.spec.whole_sequence import check_same_tokens

AFFINE = (
    "linear",
    "retention",
    "ssd",
    "gla",
    "hgrn2",
    "rwkv6",
    "delta",
    "gated_delta",
    "kda",
    "comba",
    "gdn2",
    "dplr",
)
"""Recurrences whose new state is an affine function of the old one, and whose output is a linear
function of the state."""


@dataclass(frozen=True)
class OwnToken(TokenWise):
    """The output of a recurrence for each token alone.

    Parameters
    ----------
    of : str
        The recurrence.
    scale : float, optional
        The scale s; d^{-1/2} by default.

    Examples
    --------
    It is a packed call whose segments have one token each:

    >>> import numpy as np, precondattn as pa
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 1, 5, 2, 4))
    >>> alone = pa.Linear()(q, k, v, segment_ids=np.arange(5)[None])
    >>> bool(np.allclose(OwnToken(of="linear")(q, k, v), alone))
    True
    """

    name: ClassVar[str] = "own_token"
    variants: ClassVar[tuple[str, ...]] = tuple(
        f"own_token[of={name}]"
        for name in AFFINE[2:]  # Retention's is that of linear attention.
    )
    of: str = options.choice(*AFFINE)
    scale: float | None = options.positive_or_none()

    @cached_property
    def recurrent(self) -> LinearFamily:
        """The recurrence itself."""
        cls = cast("type[LinearFamily]", registry.known(self.of))
        return cls(scale=self.scale)

    @property
    def inputs(self) -> Inputs:
        return self.recurrent.inputs

    @property
    def output(self) -> str:  # type: ignore[override]
        return self.recurrent.output

    def meaning(self, name: str) -> object:
        return self.recurrent.meaning(name)

    def check_call(self, sizes: Mapping[str, int], masks: frozenset[str]) -> None:
        check_same_tokens(self, "each token reads itself,", sizes)

    def _rows(self, x: ByName, frame: Frame) -> tuple[Stream, Stream]:
        """The stream of the recurrence, and of its last step: what a token writes, and reads."""
        stream, n = self.recurrent.stream(x, frame), self.recurrent.steps_per_token
        q, k, v = (of_last(rows, n) for rows in (stream.q, stream.k, stream.v))
        if "u" in x:
            q = q * bonus_of(x, k.shape[1])
        beta = None if stream.beta is None else of_last(stream.beta, n)
        return stream, Stream(q, k[:, :, :, None, :], v[:, :, :, None, :], stream.g, beta)

    def forward(self, x: ByName, frame: Frame) -> tuple[Array, Residuals]:
        _, token = self._rows(x, frame)
        c = row_sum(token.q * token.k)
        if token.beta is not None:
            c = c * token.beta[..., None, None]
        return rows_of_states(c * token.v), ()

    def backward(
        self, x: ByName, frame: Frame, out: Array, residuals: Residuals, cotangent: Array
    ) -> Arrays:
        stream, token = self._rows(x, frame)
        xp, n = namespace(cotangent), self.recurrent.steps_per_token
        beta = 1.0 if token.beta is None else token.beta[..., None, None]
        d_o = queries_of_states(cotangent, token.k.shape[1])
        c, d_c = row_sum(token.q * token.k), row_sum(d_o * token.v)
        d_q, d_k = beta * d_c * token.k, xp.sum(beta * d_c * token.q, axis=3)
        gradients = {}
        if "u" in x:
            q, h = of_last(stream.q, n), x["q"].shape[2]
            d_u = xp.sum(d_q * q, axis=(0, 2), keepdims=True)
            gradients["u"] = queries_of_rows(d_u, h)[0, 0, ...]
            d_q = d_q * bonus_of(x, token.k.shape[1])
        d = Stream(
            at_last(d_q, n),
            at_last(d_k, n),
            at_last(xp.sum(beta * c * d_o, axis=3), n),
            xp.zeros_like(stream.g),
            None if token.beta is None else at_last(xp.sum(c * d_c, axis=3)[..., 0], n),
            None if stream.erase is None else xp.zeros_like(stream.erase),
            None if stream.undecayed is None else xp.zeros_like(stream.undecayed),
        )
        return {**self.recurrent.gradients(x, d, frame), **gradients}
