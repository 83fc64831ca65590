"""What a call costs: FLOPs and bytes, by mechanism and work.

A mechanism costs what the leaves of its program cost. With N tokens, widths d and e, and p = N² for
a causal call (twice the number of pairs of a query and a key that it sees), for each head:

==================  ========================  =====================  =========================
leaf                forward                   backward               decode
==================  ========================  =====================  =========================
softmax             p (d + e)                 p (3 d + 2 e)          2 N (d + e)
lucid_solve         the same, for each key/value head instead of each query head
path                p (d + e + r)             2.75 × forward         2 N (d + e) + N min(4d, 2d²/C)
delta, gated_delta  N (6 d e + 4 C (d + e))   2.5 × forward          7 d e
linear, gla, …      N (4 d e + 2 C (d + e))   2.5 × forward          5 d e
conditioned_query   N (4 d² + 4 C d)          2.5 × forward          5 d²
unit_rows           3 N e                     3 N e                  3 e
==================  ========================  =====================  =========================

with r = min(2 d, d² / C) and C = 64 tokens to a chunk; a multiplication with addition is two FLOPs.
Exponentials are not counted, nor what an implementation does twice: these are the FLOPs of the
mathematics, so that the share of the machine's rate says what is left to gain.

Bytes are the least that has to move. Forward: inputs, output, and every value between two leaves
once there and once back. Backward: these again, and every gradient. Decode: the live part of every
buffer of the cache, and states there and back.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import precondattn as pa
from precondattn.algebra.declaration import FIXED, Pattern
from precondattn.algebra.program import Program

CHUNK = 64
"""C: how many tokens a chunkwise algorithm takes at a time."""

Sizes = Mapping[str, int]


class Cost(NamedTuple):
    """Floating point operations, or bytes, by work."""

    forward: float
    backward: float
    decode: float

    def times(self, count: float) -> Cost:
        return Cost(*(count * each for each in self))

    def of(self, work: str) -> float:
        """What one run of this work costs."""
        if work == "forward_backward":
            return self.forward + self.backward
        return self.decode if work == "decode" else self.forward


def flops(mechanism: pa.Mechanism, sizes: Sizes, work: str) -> float:
    """The floating point operations of one run."""
    return sum(cost.of(work) for cost in leaf_flops(mechanism.program, sizes))


def leaf_flops(program: Program, sizes: Sizes) -> list[Cost]:
    """What each leaf of a program costs, in its order."""
    found = []
    for call, axes in zip(program.calls, program.axes, strict=True):
        own = {letter: axis.size(sizes) for letter, axis in axes.items() if letter != FIXED}
        rule = RULES.get(type(call.leaf).name, _token_wise)
        found.append(rule(call.leaf, own).times(own.get("b", 1)))
    return found


def is_quadratic(leaf: Any) -> bool:
    """Whether the reference needs an array of all pairs of tokens for this leaf."""
    return type(leaf).name in ("softmax", "path", "lucid_solve")


def _pairs(leaf: Any, t: int, s: int) -> float:
    """Twice the number of pairs of a query and a key that are seen; N² in a plain causal call."""
    window = getattr(leaf, "window", None)
    if not getattr(leaf, "causal", True):
        return 2.0 * t * (s if window is None else min(s, 2 * window - 1))
    if window is None or window >= s:
        return 2.0 * t * s - float(t) ** 2
    return 2.0 * t * window - float(window) ** 2 * (t == s)


def _seen(leaf: Any, s: int) -> int:
    """How many keys a single query at the end sees."""
    window = getattr(leaf, "window", None)
    return s if window is None else min(s, window)


def _softmax(leaf: Any, z: Sizes) -> Cost:
    p, d, e = _pairs(leaf, z["t"], z["s"]), z["d"], z["e"]
    last = 2.0 * _seen(leaf, z["s"]) * (d + e)
    return Cost(p * (d + e), p * (3 * d + 2 * e), last).times(z["h"])


def _reflected(p: float, seen: int, d: int, e: int, chunk: int) -> Cost:
    """A metric that carries the key through products of reflections."""
    forward = p * (d + e + min(2 * d, d * d / chunk))
    decode = 2.0 * seen * (d + e) + min(4.0 * seen * d, 2.0 * seen * d * d / chunk)
    return Cost(forward, 2.75 * forward, decode)


def _path(leaf: Any, z: Sizes) -> Cost:
    p = _pairs(leaf, z["t"], z["s"])
    return _reflected(p, _seen(leaf, z["s"]), z["d"], z["e"], CHUNK).times(z["h"])


def _lucid_solve(leaf: Any, z: Sizes) -> Cost:
    p, d, e, seen = _pairs(leaf, z["s"], z["s"]), z["d"], z["e"], _seen(leaf, z["s"])
    if leaf.metric.inputs:
        found = _reflected(p, seen, d, e, CHUNK)
        return found._replace(decode=2.0 * seen * (d + e)).times(z["n"])
    return Cost(p * (d + e), p * (3 * d + 2 * e), 2.0 * seen * (d + e)).times(z["n"])


def _chunkwise(forward: float, decode: float) -> Cost:
    return Cost(forward, 2.5 * forward, decode)


def _delta(leaf: Any, z: Sizes) -> Cost:
    d, e = z["d"], z["e"]
    each = _chunkwise(z["s"] * (6.0 * d * e + 4 * CHUNK * (d + e)), 7.0 * d * e)
    return each.times(z["u"])


def _additive(leaf: Any, z: Sizes, widths: tuple[str, str] = ("d", "e")) -> Cost:
    d, e = (z[letter] for letter in widths)
    each = _chunkwise(z["s"] * (4.0 * d * e + 2 * CHUNK * (d + e)), 5.0 * d * e)
    return each.times(z.get("u", z["h"]))


def _slots(leaf: Any, z: Sizes) -> Cost:
    """Two additive states: keys by slots, slots by values."""
    first, second = _additive(leaf, z, ("d", "m")), _additive(leaf, z, ("m", "e"))
    return Cost(*(a + b for a, b in zip(first, second, strict=True)))


def _conditioned(leaf: Any, z: Sizes) -> Cost:
    d = z["d"]
    return _chunkwise(z["s"] * (4.0 * d * d + 4 * CHUNK * d), 5.0 * d * d).times(z["h"])


def _hedgehog(leaf: Any, z: Sizes) -> Cost:
    """A d × d matrix for each row."""
    row = 2.0 * z["d"] * z["d"] * z["h"]
    return Cost(row * z["t"], 2 * row * z["t"], row)


def _token_wise(leaf: Any, z: Sizes) -> Cost:
    """A pass over its output, as that of a norm: three operations for each element."""
    pattern = Pattern.read(leaf.output)
    elements = 3.0 * prod(pattern.shape(z)) / z.get("b", 1)
    axis = pattern.time_axis
    last = elements / pattern.axes[axis].size(z) if axis is not None else elements
    return Cost(elements, elements, last)


RULES = {
    "softmax": _softmax,
    "path": _path,
    "lucid_solve": _lucid_solve,
    "delta": _delta,
    "gated_delta": _delta,
    "linear": _additive,
    "retention": _additive,
    "ssd": _additive,
    "gla": _additive,
    "gsa": _slots,
    "conditioned_query": _conditioned,
    "query_weighted_query": _conditioned,
    "hedgehog_map": _hedgehog,
}
"""By the leaf's name; every other leaf goes token by token over what it is given."""


def moved_bytes(mechanism: pa.Mechanism, sizes: Sizes, work: str, itemsize: int) -> float:
    """The least number of bytes that one run has to move."""
    program = mechanism.program
    outer = sum(prod(p.shape(sizes)) for p in program.inputs.values())
    out = prod(program.output.shape(sizes))
    if work == "decode":
        return _cache_bytes(mechanism, sizes, itemsize) + itemsize * (outer + out) / sizes["s"]
    between = 0
    for call, axes in zip(program.calls, program.axes, strict=True):
        if call.out != program.out:
            between += prod(Pattern.read(call.leaf.output).substituted(axes).shape(sizes))
    cost = Cost(outer + out + 2 * between, 2 * (outer + out) + 2 * between, 0)
    return itemsize * cost.of(work)


def _cache_bytes(mechanism: pa.Mechanism, sizes: Sizes, itemsize: int) -> float:
    """What decoding one token reads of the cache; a state is written too."""
    total = 0.0
    window = min(_seen(leaf, sizes["s"]) for leaf in mechanism.program.leaves)
    for slot, pattern in mechanism.program.slots.values():
        keeps_tokens = "c" in pattern.letters
        elements = prod(pattern.shape({**sizes, "c": window}))
        total += elements * (max(itemsize, 4) if slot.wide else itemsize) * (2 - keeps_tokens)
    return total
