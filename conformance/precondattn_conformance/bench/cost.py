"""The cost of a call: FLOPs and bytes, by mechanism and work.

FLOPs are those that the leaves of the program declare (`Leaf.flops`). They count the mathematics,
not an implementation, so that the share of the machine's rate shows what is left to gain.

Bytes are the least that has to move. Forward: inputs, output, and every value between two leaves,
written once and read once. Backward: these again, and every gradient. Decode: the filled part of
every buffer of the cache; states are read and written.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import precondattn as pa
from precondattn.algebra.declaration import FIXED, Pattern
from precondattn.algebra.flops import visible_keys
from precondattn.algebra.leaf_protocol import LeafProtocol
from precondattn.algebra.program import Program

Sizes = Mapping[str, int]


def flops(mechanism: pa.Mechanism, sizes: Sizes, work: str) -> float | None:
    """The floating-point operations of one run; None where those of a leaf are unknown."""
    of_leaves = leaf_flops(mechanism.program, sizes)
    return None if None in of_leaves else sum((each.of(work) for each in of_leaves if each), 0.0)


def leaf_flops(program: Program, sizes: Sizes) -> list[pa.Flops | None]:
    """The FLOPs of each leaf of a program, in order; None where a leaf declares none."""
    counts: list[pa.Flops | None] = []
    for call, axes in zip(program.calls, program.axes, strict=True):
        leaf_sizes = {letter: axis.size(sizes) for letter, axis in axes.items() if letter != FIXED}
        of_sequence = call.leaf.flops(leaf_sizes)
        counts.append(of_sequence and of_sequence.times(leaf_sizes.get("b", 1)))
    return counts


def keeps_tokens(leaf: LeafProtocol) -> bool:
    """Whether the leaf caches an entry for each token.

    The reference then computes an array of all pairs of tokens.
    """
    return any(Pattern.read(slot.pattern).keeps_tokens for slot in leaf.slots())


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
    forward, backward = outer + out + 2 * between, 2 * (outer + out) + 2 * between
    return float(itemsize * (forward + backward if work == "forward_backward" else forward))


def _cache_bytes(mechanism: pa.Mechanism, sizes: Sizes, itemsize: int) -> float:
    """The bytes of the cache that decoding one token reads; a state is written too."""
    total = 0.0
    leaves = mechanism.program.leaves
    keys = min(visible_keys(sizes["s"], getattr(leaf, "window", None)) for leaf in leaves)
    for slot, pattern in mechanism.program.slots.values():
        elements = prod(pattern.shape({**sizes, "c": keys}))
        width = max(itemsize, 4) if slot.wide else itemsize
        total += elements * width * (1 if pattern.keeps_tokens else 2)
    return total
