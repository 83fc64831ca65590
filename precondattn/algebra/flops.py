"""The FLOPs of a leaf: the cost of its equations for one sequence, for every backend the same.

With N tokens, widths d and e, C = 64 tokens in a chunk, and p twice the number of visible pairs of
a query and a key (p = N² for a causal call), for each head:

========================  ========================  =============  ===============
leaf                      forward                   backward       decode
========================  ========================  =============  ===============
that keeps k and v        p (d + e)                 p (3 d + 2 e)  2 N (d + e)
with an additive state    N (4 d e + 2 C (d + e))   2.5 × forward  5 d e
with a delta rule         N (6 d e + 4 C (d + e))   2.5 × forward  7 d e
token by token, N × e     3 N e                     3 N e          3 e
========================  ========================  =============  ===============

A multiplication and an addition are two FLOPs. Exponentials are not counted, nor is recomputation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from precondattn.algebra.declaration import HEADS

CHUNK = 64
"""The number C of tokens in one chunk of a chunkwise algorithm."""


class Flops(NamedTuple):
    """The floating-point operations of a forward pass, of its gradient, and of decoding one token.

    Examples
    --------
    >>> import precondattn as pa
    >>> pa.Flops(forward=100.0, backward=250.0, decode=10.0).times(4).of("forward_backward")
    1400.0
    """

    forward: float
    backward: float
    decode: float

    def times(self, count: float) -> Flops:
        """The FLOPs of `count` such computations, for example of `count` heads."""
        return Flops(*(count * each for each in self))

    def of(self, work: str) -> float:
        """The FLOPs of the work `"forward"`, `"forward_backward"` or `"decode"`."""
        if work == "forward_backward":
            return self.forward + self.backward
        return self.decode if work == "decode" else self.forward


def visible_pairs(t: int, s: int, *, causal: bool = True, window: int | None = None) -> float:
    """Twice the number of visible pairs of t queries and s keys; N² in a plain causal call."""
    if not causal:
        return 2.0 * t * (s if window is None else min(s, 2 * window - 1))
    if window is None or window >= s:
        return 2.0 * t * s - float(t) ** 2
    return 2.0 * t * window - float(window) ** 2 * (t == s)


def visible_keys(s: int, window: int | None) -> int:
    """The number of keys that one query at the end attends to."""
    return s if window is None else min(s, window)


def pair_flops(pairs: float, keys: int, d: int, e: int) -> Flops:
    """The FLOPs of softmax attention in one head; `pairs` is the result of `visible_pairs`."""
    return Flops(pairs * (d + e), pairs * (3 * d + 2 * e), 2.0 * keys * (d + e))


def state_flops(tokens: int, d: int, e: int, *, is_delta: bool = False) -> Flops:
    """The FLOPs of one d × e state that each token writes to and reads from, in chunks."""
    products, within_chunk, step = (6.0, 4, 7.0) if is_delta else (4.0, 2, 5.0)
    forward = tokens * (products * d * e + within_chunk * CHUNK * (d + e))
    return Flops(forward, 2.5 * forward, step * d * e)


def state_heads(sizes: Mapping[str, int]) -> int:
    """The number of heads that read a state: value heads, if there are more of them."""
    return max(sizes[letter] for letter in HEADS if letter in sizes)
