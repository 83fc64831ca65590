"""Channel attention: softmax attention between channels, which is linear in tokens.

    A = softmax(s qᵀ k)  (d, d),    o_t = A v_t

with s = d^{-1/2}, or N^{-1/2} of N tokens. Row i of A has the weights of the channels of v in
channel i of the output. It is attention of tokens with tokens and channels exchanged. XCiT's
(`cross_covariance.py`) has channels of length 1 instead, and a learned factor.

Source: DaViT (arXiv 2204.03645), channel group attention; N^{-1/2} is that of the
public code of Florence-2 (arXiv 2311.06242).

Gradient, with dL = A ∘ (dA − rowsum(dA ∘ A)) and dA = doᵀ v:

    dv = do A,    dq = s k dLᵀ,    dk = s q dL.

A token that `lengths` or `key_mask` masks is taken out of the products and of N. Its output is 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from precondattn.algebra import Flops, Inputs, Offers, options
from precondattn.arrays import Array, Arrays, ByName, cast, namespace
from precondattn.spec.array_functions import (
    input_gradients,
    softmax,
    softmax_vjp,
    swap_time_and_heads,
    transpose,
)
from precondattn.spec.whole_sequence import (
    WholeSequence,
    check_same_tokens,
    only_valid,
    valid_as_both,
    valid_rows,
)


@dataclass(frozen=True)
class BetweenChannels(WholeSequence):
    """Attention between channels: a row of its matrix is a channel of the output."""

    output = "b t h d"

    def check_call(self, sizes: Mapping[str, int], masks: frozenset[str]) -> None:
        check_same_tokens(self, "channels are compared", sizes)

    def flops(self, sizes: Mapping[str, int]) -> Flops:
        product = 2.0 * sizes["t"] * sizes["d"] ** 2
        return Flops(2 * product, 4 * product, 0.0).times(sizes["h"])


@dataclass(frozen=True)
class Channel(BetweenChannels):
    """Attention between channels: o_t = softmax(s qᵀ k) v_t.

    A row of the attention matrix is a channel, and `row_normalized` makes each channel of the
    output 1 long over the tokens. With fewer key/value heads than query heads (n < h), query head i
    reads key/value head ⌊i n / h⌋. Queries and keys are those of the same tokens, and values are as
    wide as keys. It is not causal and has no cache.

    Source: DaViT (arXiv 2204.03645), channel group attention.

    Parameters
    ----------
    scale : float, optional
        The factor s of the logits.
    scale_by : {"width", "tokens"}
        Whether s is d^{-1/2} or N^{-1/2} where no `scale` is given. Masked tokens do not count.

    Examples
    --------
    >>> import numpy as np, precondattn as pa
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 1, 50, 2, 4))
    >>> out = pa.Channel()(q, k, v)
    >>> exchanged = (x.transpose(0, 3, 2, 1) for x in (q, k, v))
    >>> same = pa.Softmax(causal=False, scale=0.5)(*exchanged).transpose(0, 3, 2, 1)
    >>> bool(np.allclose(out, same))
    True
    """

    name: ClassVar[str] = "channel"
    variants: ClassVar[tuple[str, ...]] = ("channel[scale=0.3]", "channel[scale_by=tokens]")

    scale: float | None = options.positive_or_none()
    scale_by: str = options.choice("width", "tokens")

    inputs = Inputs(q="b t h d", k="b s n d", v="b s n d")

    def check_together(self) -> None:
        if self.scale is not None and self.scale_by != "width":
            raise ValueError(
                f"{self.name}: scale={self.scale} is the factor of the logits, and scale_by="
                f"{self.scale_by} would be another; give one of them"
            )

    @property
    def offers(self) -> Offers:
        return Offers(scale=self.scale, causal=False, row_axis="channel")

    def factor(self, q: Array, valid: Array | None) -> Array | float:
        """s, of q (b, h, t, d): a number, or one for each sequence, (b, 1, 1, 1)."""
        t, d = q.shape[2:]
        if self.scale is not None:
            return self.scale
        if self.scale_by == "width":
            return d**-0.5
        if valid is None:
            return t**-0.5
        xp = namespace(q)
        count = xp.sum(cast(valid, q.dtype), axis=1)[:, None, None, None]
        return xp.where(count > 0, count, 1.0) ** -0.5

    def attend(self, x: ByName, q_valid: Array | None, k_valid: Array | None) -> Array:
        valid = valid_as_both(q_valid, k_valid)
        q, k, v = valid_rows(x, valid)
        weights = softmax(self.factor(q, valid) * (transpose(q) @ k))
        return swap_time_and_heads(v @ transpose(weights))

    def attend_vjp(
        self, x: ByName, q_valid: Array | None, k_valid: Array | None, cotangent: Array
    ) -> Arrays:
        n, valid = x["k"].shape[2], valid_as_both(q_valid, k_valid)
        q, k, v = valid_rows(x, valid)
        s = self.factor(q, valid)
        weights = softmax(s * (transpose(q) @ k))
        d_o = only_valid(valid, swap_time_and_heads(cotangent))
        d_logits = s * softmax_vjp(weights, transpose(d_o) @ v)
        return input_gradients(k @ transpose(d_logits), q @ d_logits, d_o @ weights, n)
