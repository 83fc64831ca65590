"""Every kernel as it is shipped, to be compiled on a machine without a GPU.

    python -m precondattn_kernel_tools.triton_compiler precondattn_triton.variants …

The backend's own launching code runs on meta tensors, and its launches are recorded.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

import precondattn as pa
from precondattn.algebra.group import Group, group_of
from precondattn.algebra.piece import Piece
from precondattn.frame import Frame
from precondattn.kernel_backend.kernel_table import recurrences_in
from precondattn.spec.stateful import Stateful
from precondattn_kernel_tools.triton_compiler import Variant
from precondattn_kernel_tools.triton_launches import TritonLaunch, recorded
from precondattn_triton.backend import KERNELS, WIDEST_ON_AMD, Triton
from precondattn_triton.target import compiling_for

Shipped = tuple[tuple[str, tuple[torch.dtype, ...], tuple[tuple[int, int], ...]], ...]
"""Mechanisms, dtypes, and widths of keys and values. Narrower arrays have the same tiles."""

CHOSEN: Shipped = (
    ("lucid_solve[beta=true]", (torch.bfloat16,), ((256, 256), (128, 128), (64, 64))),
    ("lucid_solve", (torch.float32,), ((256, 256), (128, 128), (64, 64))),
    (
        "lucid_solve[metric=transported]",
        (torch.bfloat16, torch.float32),
        ((256, 256), (128, 128), (64, 64)),
    ),
    ("unit_rows", (torch.bfloat16,), ((256, 512),)),
    (
        "laser",
        (torch.bfloat16, torch.float32),
        ((256, 512), (256, 256), (128, 128), (64, 64)),
    ),
    ("laser", (torch.float16,), ((256, 512), (128, 128))),
    ("differential", (torch.float16,), ((128, 128),)),
    ("path", (torch.float16,), ((128, 128),)),
    ("gla", (torch.float16,), ((128, 128),)),
    ("conditioned_query", (torch.float16,), ((128, 128),)),
    ("differential", (torch.bfloat16,), ((256, 512), (256, 256), (128, 128), (64, 64))),
    ("differential", (torch.float32,), ((256, 256), (128, 128), (64, 64))),
    ("path", (torch.bfloat16,), ((256, 512), (256, 256), (128, 128), (64, 64))),
    ("path", (torch.float32,), ((256, 256), (128, 128), (64, 64))),
    (
        "windowed[size=7,shift=3,grid=64/64,bias=true]",
        (torch.bfloat16, torch.float32),
        ((256, 256), (128, 128), (64, 64)),
    ),
    ("windowed[size=7,shift=3,grid=64/64,bias=true]", (torch.float16,), ((128, 128),)),
    ("gated_delta", (torch.bfloat16,), ((256, 512), (128, 128))),
    ("gated_delta", (torch.float32,), ((256, 512), (128, 128), (64, 64))),
    ("gated_delta", (torch.float16,), ((256, 512), (128, 128))),
    ("linear", (torch.bfloat16, torch.float32), ((128, 128),)),
    ("gla", (torch.bfloat16,), ((128, 128),)),
    ("gla", (torch.float32,), ((256, 512), (128, 128))),
    ("gsa", (torch.bfloat16, torch.float32), ((128, 128),)),
    ("kda", (torch.bfloat16,), ((256, 512), (128, 128))),
    ("kda", (torch.float32,), ((256, 512), (128, 128), (64, 64))),
    ("kda", (torch.float16,), ((128, 128),)),
    ("comba", (torch.bfloat16, torch.float32), ((256, 512), (128, 128))),
    ("erasing_gated_delta", (torch.bfloat16, torch.float32), ((256, 512), (128, 128))),
    ("erasing_kda", (torch.bfloat16, torch.float32), ((256, 512), (128, 128))),
    ("comba", (torch.float16,), ((128, 128),)),
    ("erasing_kda", (torch.float16,), ((128, 128),)),
    ("preconditioned_key", (torch.bfloat16,), ((256, 256), (128, 128))),
    ("ccq(gated_delta)", (torch.bfloat16,), ((256, 512), (128, 128), (64, 64))),
    ("ccq(gated_delta)", (torch.float32,), ((256, 512), (128, 128), (64, 64))),
    ("ccq(linear)", (torch.bfloat16, torch.float32), ((256, 512), (128, 128))),
    ("conditioned_query", (torch.bfloat16, torch.float32), ((256, 256), (128, 128), (64, 64))),
    ("mesa_query[decay=head,beta=true]", (torch.float32,), ((128, 128), (64, 64))),
)
"""Mechanisms with configurations of their own, and the widths of these; listed by hand."""

LEAVES = {leaf.name for name, *_ in CHOSEN for leaf in pa.parse(name).program.leaves}
CALLS: Shipped = (
    *CHOSEN,
    *(
        (leaf.name, (torch.bfloat16, torch.float32, torch.float16), ((128, 128),))
        for leaf in recurrences_in(KERNELS)
        if leaf.name not in LEAVES
    ),
)
"""Full calls, with their gradients. All other recurrences have the kernels of these or, without a
decay, a few of their own."""

PACKED: Shipped = tuple(
    (name, (torch.bfloat16,), ((128, 128),))
    for name in (
        *("lucid_solve[beta=true]", "lucid_solve[metric=transported]"),
        *("laser", "differential", "path"),
    )
)
"""Calls of packed sequences, of which only the kernels that read segments are compiled."""

STEPS: Shipped = (
    ("lucid", (torch.bfloat16, torch.float32), ((256, 256), (128, 128))),
    ("path[flush=64]", (torch.bfloat16, torch.float32), ((256, 256), (128, 128))),
)
"""Extensions of a cache by one token."""

TOKENS, HEADS, BATCH, SLOTS = 4096, 16, 2, 64
DISTINGUISHING = (
    *("ROWS", "COLUMNS", "CHUNK", "TILE", "STEP", "BACKWARD", "BY_ROW", "PART"),
    *("KEYS", "BLOCK", "DECAY", "GATE_STEP", "HAS_BORDERS", "UNDECAYED"),
)
"""The constants of a kernel that depend on its configuration or select a code path."""
WIDE_SPILLS = 10400
"""Bytes that a thread may spill where rows are wider than 128. In float32 some kernels do; PaTH's
at 256 spill most, on compute capability 8.0."""
BORDER_SPILLS = 8
"""The limit for `at_border` in packed sequences, on compute capability 8.0."""

FLOAT16_SPILLS = 32
"""The limit for two kernels in float16, on compute capability 8.0, where the assembler keeps to
128 registers."""
SPILLING_IN_FLOAT16 = ("key_value_gradient", "carry_moments")
UNDECAYED_SPILLS = 4
"""The limit for the gradient of keys in float32, without decay and with another key to erase."""


def variants(target: str) -> Iterator[Variant]:
    """Every kernel in every configuration: one variant for widths up to 128, one for wider rows."""
    yielded = set()
    is_amd = target.startswith("gfx")
    shipped = [
        (*call, options)
        for calls, options in (
            (CALLS, {}),
            (PACKED, {"is_packed": True}),
            (STEPS, {"is_step": True}),
        )
        for call in calls
    ]
    for mechanism, dtypes, widths, options in shipped:
        for dtype in dtypes:
            for d, e in widths:
                if is_amd and max(d, e) > WIDEST_ON_AMD:
                    continue
                with compiling_for(target):
                    launched = launches(mechanism, dtype, d, e, **options)
                for launch in launched:
                    constants = tuple(launch.arguments.get(name) for name in DISTINGUISHING)
                    tuned = tuple(sorted(launch.options.items()))
                    is_wide = max(d, e) > 128
                    function = launch.function.module, launch.function.__name__
                    identity = (
                        *(function, dtype, _first_dtype(launch), constants, tuned, is_wide),
                        *(_is_packed(launch), launch.arguments.get("erase") is not None),
                    )
                    if identity not in yielded:
                        yielded.add(identity)
                        yield _variant(launch, mechanism, dtype, d, e)


def _variant(launch: TritonLaunch, mechanism: str, dtype: torch.dtype, d: int, e: int) -> Variant:
    width = str(d) if d == e else f"{d}x{e}"
    packed = " packed" if _is_packed(launch) else ""
    named = f"{mechanism} {str(dtype).removeprefix('torch.')} {width}{packed}{_way(launch)}"
    limit = 0 if max(d, e) <= 128 else WIDE_SPILLS
    if packed and launch.function.__name__ == "at_border":
        limit = BORDER_SPILLS
    if dtype == torch.float16 and launch.function.__name__ in SPILLING_IN_FLOAT16:
        limit = max(limit, FLOAT16_SPILLS)
    if named.startswith("erasing_delta float32") and launch.function.__name__ == "d_keys_of":
        limit = max(limit, UNDECAYED_SPILLS)
    return launch.variant(named)._replace(spill_limit=limit)


def _first_dtype(launch: TritonLaunch) -> torch.dtype:
    """The dtype of the first array: operands may be in the call's dtype or in another."""
    arrays = (a for a in launch.arguments.values() if isinstance(a, torch.Tensor))
    return next(arrays).dtype


def _is_packed(launch: TritonLaunch) -> bool:
    return any(launch.arguments.get(name) is not None for name in ("segment", "segments"))


def _way(launch: TritonLaunch) -> str:
    """The part of a variant's name that distinguishes a kernel's launches within one call."""
    is_backward = launch.arguments.get("BACKWARD", launch.arguments.get("BY_ROW"))
    decay, gated = launch.arguments.get("DECAY"), launch.arguments.get("GATE_STEP")
    sizes = [(name, launch.arguments.get(name.upper())) for name in ("tile", "part")]
    name = (" backward" if is_backward else "") + "".join(
        f" {n} {size}" for n, size in sizes if size
    )
    if decay is not None:
        name += f" decay of {decay}"
    return name + (f" width {gated}" if gated else "")


def launches(
    expression: str,
    dtype: torch.dtype,
    d: int,
    e: int,
    is_step: bool = False,
    is_packed: bool = False,
) -> list[TritonLaunch]:
    """The launches of a call with its gradient, or of a step."""
    mechanism = pa.parse(expression)
    is_group = len(mechanism.program.calls) > 1
    leaf = mechanism.program.leaves[0]
    assert isinstance(leaf, pa.Leaf)
    piece: Piece = Group(group_of(expression)) if is_group else leaf
    inputs = piece.inputs.extending() if is_step else piece.inputs
    sizes = {"b": BATCH, "h": HEADS, "n": HEADS, "u": HEADS, "c": TOKENS}
    sizes |= {"d": d, "e": e, "m": SLOTS}
    sizes |= {"t": 1, "s": 1} if is_step else {"t": TOKENS, "s": TOKENS}
    x = {name: _empty(pattern.shape(sizes), dtype) for name, pattern in inputs.items()}
    backend = Triton()
    with recorded() as recorded_launches:
        if is_step:
            past = {
                key: _empty(pattern.shape(sizes), torch.float32 if slot.wide else dtype)
                for key, (slot, pattern) in piece.program.slots.items()
            }
            new, slots = _empty((BATCH, 1), torch.int64), _empty((BATCH, TOKENS + 1), torch.int64)
            backend.step(piece, past, x, Frame(new, slots, None, slots.bool()))
            return recorded_launches
        position = _empty((1, TOKENS), torch.int64)
        ids = _empty((BATCH, TOKENS), torch.int64) if is_packed else None
        frame = Frame(position, position, None, None, ids, ids)
        out, residuals = backend.forward(piece, x, frame)
        backend.backward(piece, x, frame, out, residuals, torch.empty_like(out))
        if isinstance(piece, Stateful):
            by_tokens = {name for name, pattern in inputs.items() if set("ts") & {*pattern.letters}}
            last = {n: array[:, -1:] if n in by_tokens else array for n, array in x.items()}
            backend.forward(piece, last, Frame(position[:, -1:], position[:, -1:]))
    return recorded_launches


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
