"""Every kernel as it is shipped, to be compiled where there is no GPU.

    python -m precondattn_conformance.kernels.triton_compiler precondattn_triton.variants …

The backend's own launching code runs on tensors without memory, and its launches are noted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

import precondattn as pa
from precondattn.frame import Frame
from precondattn.group import Group, group_of
from precondattn_conformance.kernels.triton_compiler import Variant
from precondattn_conformance.kernels.triton_launches import Launch, recorded
from precondattn_triton.backend import Triton
from precondattn_triton.precision import compiling_for

STREAMED = ("update", "key_gradient")
CLOSE = ("_close", "_query_gradient", "_key_gradient")


class Shipped(NamedTuple):
    """A call whose kernels are compiled."""

    mechanism: str
    dtype: torch.dtype
    width: int
    kernels: tuple[str, ...] = ()
    """Only these; all where empty."""


CALLS = (
    Shipped(
        "lucid_solve[beta=true]",
        torch.bfloat16,
        64,
        ("normalize_keys", "load_right_sides", "invert_blocks", "apply_inverse", *STREAMED),
    ),
    Shipped(
        "lucid_solve",
        torch.bfloat16,
        128,
        ("invert_blocks", "left_factors", "right_factors", "apply_inverse", *STREAMED),
    ),
    Shipped("lucid_solve", torch.bfloat16, 256, STREAMED),
    Shipped("lucid_solve", torch.float32, 64, STREAMED),
    Shipped("lucid_solve", torch.float32, 128, ("apply_inverse", *STREAMED)),
    Shipped("lucid", torch.bfloat16, 128),
    Shipped("unit_rows", torch.bfloat16, 128),
    Shipped("laser", torch.bfloat16, 64, CLOSE),
    Shipped("laser", torch.bfloat16, 128, (*CLOSE, "_exact", "_exact_key_gradient")),
)
TOKENS, HEADS, BATCH = 4096, 16, 2
WIDE_SPILLS = 4096
"""Bytes that a thread may spill where rows are wider than 128."""


def variants(target: str) -> Iterator[Variant]:
    """At most 40, each once."""
    seen = set()
    for call in CALLS:
        dtype = str(call.dtype).removeprefix("torch.")
        with compiling_for(amd=target.startswith("gfx")):
            launches = _launches(call)
        for launch in launches:
            found = launch.variant(f"{call.mechanism} {dtype} {call.width}{_way(launch)}")
            found = found._replace(spill_limit=0 if call.width <= 128 else WIDE_SPILLS)
            wanted = not call.kernels or launch.function.__name__ in call.kernels
            if wanted and found.name not in seen:
                seen.add(found.name)
                yield found


def _way(launch: Launch) -> str:
    """What tells a kernel's launches of one call from each other."""
    is_backward = launch.arguments.get("BACKWARD", launch.arguments.get("BY_ROW"))
    tile = launch.arguments.get("TILE")
    return (" backward" if is_backward else "") + (f" tile {tile}" if tile else "")


def _launches(call: Shipped) -> list[Launch]:
    mechanism = pa.parse(call.mechanism)
    steps = len(mechanism.program.calls) > 1
    piece = Group(group_of(call.mechanism)) if steps else mechanism.program.leaves[0]
    inputs = piece.inputs.extending() if steps else piece.inputs
    sizes = {"b": BATCH, "h": HEADS, "n": HEADS, "c": TOKENS, "d": call.width, "e": call.width}
    sizes |= {"t": 1, "s": 1} if steps else {"t": TOKENS, "s": TOKENS}
    x = {name: _empty(pattern.shape(sizes), call.dtype) for name, pattern in inputs.items()}
    backend = Triton()
    with recorded() as launches:
        if steps:
            past = {
                key: _empty(pattern.shape(sizes), torch.float32 if slot.wide else call.dtype)
                for key, (slot, pattern) in piece.program.slots.items()
            }
            new, slots = _empty((BATCH, 1), torch.int64), _empty((BATCH, TOKENS + 1), torch.int64)
            backend.step(piece, past, x, Frame(new, slots, None, slots.bool()))
            return launches
        position = _empty((1, TOKENS), torch.int64)
        frame = Frame(position, position)
        out, residuals = backend.forward(piece, x, frame)
        backend.backward(piece, x, frame, out, residuals, torch.empty_like(out))
    return launches


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
