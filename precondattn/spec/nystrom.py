"""Nyström attention: softmax attention through m landmarks, linear in tokens.

    q̃ = M q,  k̃ = M k,  M_ji = [i in segment j] / (tokens of segment j)      m landmarks
    F = softmax(s q k̃ᵀ)  (t, m),   A = softmax(s q̃ k̃ᵀ)  (m, m),   B = softmax(s q̃ kᵀ)  (m, s)
    o = F Z (B v) + skip,    Z ≈ A⁺          (`iterated_inverse.py`)

Token i of L is in segment ⌊i m / L⌋, so that segments differ by at most one token and m need not
divide L. With L < m every token is a landmark of its own, and the other landmarks are masked in
all three kernels, as is a landmark of which `key_mask` masks all keys. Masked tokens are in no
mean. With L ≤ m landmarks F = A = B, and o is softmax attention up to the error of Z.

The skip is a convolution of the values over tokens, with weights w (h, c) per head:

    skip_i = Σ_a w_a v_{i + a − ⌊c/2⌋},    dv_j = Σ_a w_a dskip_{j − a + ⌊c/2⌋}

Source: Nyströmformer (arXiv 2102.03902), Eq. 13–15. Public code ignores masks in the means, in F
and in A.

Gradient: through the skip, the two reads, Z, the three softmaxes and the means,

    dW = Fᵀ do,   dF = do Wᵀ,   dZ = dW (B v)ᵀ,   d(B v) = Zᵀ dW     with W = Z (B v).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from precondattn.algebra import Flops, Inputs, Offers, ShapeError, options
from precondattn.arrays import (
    Array,
    Arrays,
    ByName,
    arange_like,
    cast,
    namespace,
    zero_where_not,
)
from precondattn.spec.array_functions import (
    input_gradients,
    mask_scores,
    moved,
    repeat_heads,
    softmax,
    softmax_vjp,
    swap_time_and_heads,
    transpose,
)
from precondattn.spec.iterated_inverse import iterated_inverse, iterated_inverse_vjp
from precondattn.spec.whole_sequence import WholeSequence


class Means(NamedTuple):
    """The matrix M and which of its rows are not 0."""

    matrix: Array
    """(b or 1, 1, m, tokens)"""
    is_any: Array
    """(b or 1, m)"""


@dataclass(frozen=True)
class Nystrom(WholeSequence):
    """Softmax attention through m landmarks: o = softmax(s q k̃ᵀ) A⁺ softmax(s q̃ kᵀ) v.

    With fewer key/value heads than query heads (n < h), query head i reads key/value head
    ⌊i n / h⌋. It is not causal and has no cache.

    Source: Nyströmformer (arXiv 2102.03902), Eq. 13–15 and Algorithm 1.

    Parameters
    ----------
    landmarks : int
        m: into how many segments the tokens are divided, whose means are the landmarks. Segments
        differ by at most one token. Of fewer than m tokens, each is a landmark.
    iterations : int
        Steps of the iteration for the pseudo-inverse.
    scale : float, optional
        The factor s of the logits; d^{-1/2} by default.
    start : {"matrix", "batch"}
        Whether the iteration starts from each matrix's own largest column sum, or from the largest
        of all sequences and heads of the call, as in the public code: weights trained with it need
        it. An output then depends on the other sequences of its batch.
    skip : bool
        Whether there is an input `skip` (h, c): weights of a convolution of the values over tokens,
        which is added to the output.

    Examples
    --------
    >>> import numpy as np, precondattn as pa
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 1, 12, 2, 4))
    >>> exact = pa.Softmax(causal=False)(q, k, v)
    >>> errors = [np.abs(pa.Nystrom(m, iterations=12)(q, k, v) - exact).max() for m in (4, 12)]
    >>> bool(errors[0] > 0.1 and errors[1] < 1e-3)
    True
    """

    name: ClassVar[str] = "nystrom"
    variants: ClassVar[tuple[str, ...]] = (
        "nystrom[landmarks=4]",
        "nystrom[landmarks=3,iterations=2,scale=0.3]",
        "nystrom[landmarks=5,skip=true]",
    )

    landmarks: int = options.count(64)
    iterations: int = options.count(6)
    scale: float | None = options.positive_or_none()
    start: str = options.choice("matrix", "batch")
    skip: bool = options.flag(False)

    output = "b t h e"

    @property
    def inputs(self) -> Inputs:
        skip: dict[str, str] = {"skip": "h m"} if self.skip else {}
        return Inputs(q="b t h d", k="b s n d", v="b s n e", **skip)

    @property
    def offers(self) -> Offers:
        return Offers(scale=self.scale, causal=False)

    @property
    def mixes_sequences(self) -> bool:
        return self.start == "batch"

    def check_call(self, sizes: Mapping[str, int], masks: frozenset[str]) -> None:
        t, s = sizes["t"], sizes["s"]
        if self.skip and t != s:
            raise ShapeError(
                f"{self}: the skip adds values to the outputs of the same tokens, so as many "
                f"queries as keys are expected; found t = {t} and s = {s}"
            )
        if self.mixes_sequences and "segment_ids" in masks:
            raise ValueError(
                f"{self}: packed sequences would depend on each other, as the factor of the start "
                f'is that of all sequences; start="matrix" is expected'
            )

    def flops(self, sizes: Mapping[str, int]) -> Flops:
        t, s, d, e = (sizes[letter] for letter in "tsde")
        m = min(self.landmarks, t, s)
        kernels = 2.0 * m * (t + s) * (d + e)
        inverse = 8.0 * self.iterations * m**3 + 2 * m * m * e
        return Flops(kernels + inverse, 2 * kernels + 2.5 * inverse, 0.0).times(sizes["h"])

    def _means(
        self, q: Array, k: Array, q_valid: Array | None, k_valid: Array | None
    ) -> tuple[Means, Means]:
        """The segment means of queries and of keys; a segment has the same tokens in both."""
        members = q_valid if q.shape[2] == k.shape[2] else None
        of_queries = segment_means(self.landmarks, q, q_valid)
        return of_queries, segment_means(self.landmarks, k, members, k_valid)

    def _kernels(
        self, q: Array, k: Array, means: tuple[Means, Means], k_valid: Array | None
    ) -> tuple[Array, ...]:
        """q̃ and k̃ (b, h, m, d), F (b, h, t, m), A (b, h, m, m) and B (b, h, m, s)."""
        s, (of_queries, of_keys) = self.scale_for(q.shape[-1]), means
        q_mean, k_mean = of_queries.matrix @ q, of_keys.matrix @ k
        q_any, k_any = of_queries.is_any[:, None, :, None], of_keys.is_any[:, None, None, :]
        seen = q_any if k_valid is None else q_any & k_valid[:, None, None, :]
        return (
            q_mean,
            k_mean,
            softmax(mask_scores(k_any, s * (q @ transpose(k_mean)))),
            softmax(mask_scores(q_any & k_any, s * (q_mean @ transpose(k_mean)))),
            softmax(mask_scores(seen, s * (q_mean @ transpose(k)))),
        )

    def _inverse(self, a: Array) -> Array:
        return iterated_inverse(a, self.iterations, of_all=self.start == "batch")

    def _rows(self, x: ByName, k_valid: Array | None) -> tuple[Array, Array, Array]:
        """q, k and v (b, h, tokens, ·), with values 0 at masked tokens."""
        h = x["q"].shape[2]
        q, k, v = (swap_time_and_heads(x[name]) for name in "qkv")
        v = v if k_valid is None else zero_where_not(k_valid[:, None, :, None], v)
        return q, repeat_heads(k, h), repeat_heads(v, h)

    def attend(self, x: ByName, q_valid: Array | None, k_valid: Array | None) -> Array:
        q, k, v = self._rows(x, k_valid)
        f, a, b = self._kernels(q, k, self._means(q, k, q_valid, k_valid), k_valid)[2:]
        o = f @ (self._inverse(a) @ (b @ v))
        if self.skip:
            o = o + convolved(v, x["skip"])
        return swap_time_and_heads(o)

    def attend_vjp(
        self, x: ByName, q_valid: Array | None, k_valid: Array | None, cotangent: Array
    ) -> Arrays:
        q, k, v = self._rows(x, k_valid)
        d_o, s, n = swap_time_and_heads(cotangent), self.scale_for(q.shape[-1]), x["k"].shape[2]
        means = self._means(q, k, q_valid, k_valid)
        q_mean, k_mean, f, a, b = self._kernels(q, k, means, k_valid)
        z, read_values = self._inverse(a), b @ v
        d_w = transpose(f) @ d_o
        d_read = transpose(z) @ d_w
        d_a = iterated_inverse_vjp(
            a, self.iterations, d_w @ transpose(read_values), of_all=self.start == "batch"
        )
        d_f = s * softmax_vjp(f, d_o @ transpose(z @ read_values))
        d_a = s * softmax_vjp(a, d_a)
        d_b = s * softmax_vjp(b, d_read @ transpose(v))
        d_q_mean = d_a @ k_mean + d_b @ k
        d_k_mean = transpose(d_a) @ q_mean + transpose(d_f) @ q
        d_q = d_f @ k_mean + transpose(means[0].matrix) @ d_q_mean
        d_k = transpose(d_b) @ q_mean + transpose(means[1].matrix) @ d_k_mean
        d_v, gradients = transpose(b) @ d_read, {}
        if self.skip:
            d_skipped, gradients["skip"] = convolved_vjp(v, x["skip"], d_o)
            d_v = d_v + d_skipped
        if k_valid is not None:
            d_v = zero_where_not(k_valid[:, None, :, None], d_v)
        return input_gradients(d_q, d_k, d_v, n) | gradients


def segment_means(
    m: int, like: Array, members: Array | None = None, counted: Array | None = None
) -> Means:
    """The means of x (b, heads, tokens, d) like `like`.

    `members` (b, tokens) are the tokens of the sequence, which are divided into segments; `counted`
    are those of them that a mean is of.
    """
    xp, tokens = namespace(like), like.shape[2]
    if members is None:
        segment = arange_like(tokens, like)[None, :] * m // tokens
    else:
        ones = cast(members, xp.int32)
        rank = xp.cumulative_sum(ones, axis=1, dtype=xp.int32) - 1
        length = xp.sum(ones, axis=1, keepdims=True, dtype=xp.int32)
        segment = rank * m // xp.clip(length, min=1)
    is_in = segment[:, None, :] == arange_like(m, like)[None, :, None]
    for mask in (members, counted):
        is_in = is_in if mask is None else is_in & mask[:, None, :]
    matrix = cast(is_in, like.dtype)
    total = xp.sum(matrix, axis=2, keepdims=True)
    matrix = matrix / xp.clip(total, min=1.0)
    return Means(matrix[:, None, :, :], total[:, :, 0] > 0)


def convolved(v: Array, weight: Array) -> Array:
    """Σ_a w_a v_{i + a − ⌊c/2⌋} (b, h, t, e), 0 for tokens that do not exist, from w (h, c)."""
    shifts = _shifts(weight)
    return sum(weight[None, :, None, a, None] * moved(v, shift, axis=2) for a, shift in shifts)


def convolved_vjp(v: Array, weight: Array, d_y: Array) -> tuple[Array, Array]:
    """The gradients of v and of w."""
    xp, shifts = namespace(v), _shifts(weight)
    d_v = sum(weight[None, :, None, a, None] * moved(d_y, -shift, axis=2) for a, shift in shifts)
    d_weight = [xp.sum(d_y * moved(v, shift, axis=2), axis=(0, 2, 3)) for _, shift in shifts]
    return d_v, xp.stack(d_weight, axis=1)


def _shifts(weight: Array) -> list[tuple[int, int]]:
    """a and a − ⌊c/2⌋ of each weight."""
    c = weight.shape[1]
    return [(a, a - c // 2) for a in range(c)]
