"""Every kernel as it is shipped, to be compiled on a machine without a GPU.

    python -m precondattn_kernel_tools.triton_compiler precondattn_triton.variants …

The backend's own launching code runs on meta tensors, and its launches are recorded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
import triton

import precondattn as pa
from precondattn.algebra.group import Group, group_of
from precondattn.algebra.piece import Piece
from precondattn.frame import Frame
from precondattn.kernel_backend.backend import KernelRunner
from precondattn.kernel_backend.kernel_table import recurrences_in
from precondattn.spec.stateful import Stateful
from precondattn_kernel_tools.triton_compiler import Variant
from precondattn_kernel_tools.triton_launches import TritonLaunch, recorded
from precondattn_triton.backend import KERNELS, WIDEST_ON_AMD, Triton
from precondattn_triton.path.blocks import SMALLEST
from precondattn_triton.target import compiling_for

Shipped = tuple[tuple[str, tuple[torch.dtype, ...], tuple[tuple[int, int], ...]], ...]
"""Mechanisms, dtypes, and widths of keys and values. Narrower arrays have the same tiles."""

CAPPED, SINKING = "softmax[window=1024,softcap=30]", "softmax[window=128,sink=true]"
BIASED, SLOPING = "softmax[bias=true]", "softmax[distance=slopes]"
"""Options as models have them: Gemma 2, gpt-oss, T5's and AlphaFold's biases, ALiBi."""

CHOSEN: Shipped = (
    ("lucid_solve[beta=true]", (torch.bfloat16,), ((256, 256), (128, 128), (64, 64))),
    ("lucid_solve[beta=true]", (torch.float16,), ((128, 128),)),
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
        ((720, 720), (256, 512), (256, 256), (128, 128), (64, 64)),
    ),
    ("laser", (torch.float16,), ((720, 720), (256, 512), (128, 128))),
    (f"laser({BIASED})", (torch.bfloat16, torch.float32), ((720, 720), (128, 128), (64, 64))),
    (f"laser({BIASED})", (torch.float16,), ((128, 128),)),
    (f"laser({CAPPED})", (torch.bfloat16,), ((128, 128),)),
    ("laser(softmax[window=1024])", (torch.bfloat16,), ((128, 128), (64, 64))),
    (CAPPED, (torch.bfloat16,), ((256, 256), (128, 128), (64, 64))),
    (BIASED, (torch.bfloat16,), ((256, 512), (128, 128), (64, 64))),
    (BIASED, (torch.float32,), ((256, 256), (128, 128), (64, 64))),
    (BIASED, (torch.float16,), ((128, 128),)),
    (SINKING, (torch.bfloat16,), ((64, 64),)),
    (SLOPING, (torch.bfloat16,), ((128, 128),)),
    ("path", (torch.float16,), ((128, 128),)),
    ("gla", (torch.float16,), ((128, 128),)),
    ("conditioned_query", (torch.float16,), ((128, 128),)),
    ("path", (torch.bfloat16,), ((256, 512), (256, 256), (128, 512), (128, 128), (64, 64))),
    ("path", (torch.float32,), ((256, 256), (128, 256), (128, 128), (64, 64))),
    ("gated_delta", (torch.bfloat16,), ((256, 512), (128, 128))),
    ("gated_delta", (torch.float32,), ((256, 512), (128, 128), (64, 64))),
    ("gated_delta", (torch.float16,), ((256, 512), (128, 128))),
    ("linear", (torch.bfloat16, torch.float32), ((128, 128),)),
    ("gla", (torch.bfloat16,), ((512, 512), (128, 128))),
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
    ("ccq(kda)", (torch.bfloat16,), ((128, 128),)),
    ("ccq(gla)", (torch.bfloat16,), ((256, 512),)),
    ("conditioned_query", (torch.bfloat16, torch.float32), ((256, 256), (128, 128), (64, 64))),
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
        *("laser", "path", SINKING),
    )
)
"""Calls of packed sequences, of which only the kernels that read segments are compiled."""

STEPS: Shipped = (
    ("lucid", (torch.bfloat16, torch.float32), ((256, 256), (128, 128))),
    ("path[flush=64]", (torch.bfloat16, torch.float32), ((256, 256), (128, 128))),
    ("laser", (torch.bfloat16, torch.float32), ((256, 256), (128, 128))),
    (f"laser({BIASED})", (torch.bfloat16,), ((128, 128),)),
)
"""Extensions of a cache by one token."""

EXTENSIONS: Shipped = (
    ("path[flush=64]", (torch.bfloat16,), ((128, 512), (128, 128), (64, 64))),
    ("path[flush=64]", (torch.float32,), ((128, 256), (128, 128), (64, 64))),
    ("path[flush=64]", (torch.float16,), ((128, 128),)),
    ("lucid_solve[metric=transported]", (torch.bfloat16,), ((128, 128), (64, 64))),
    ("lucid_solve[metric=transported]", (torch.float32,), ((128, 128), (64, 64))),
    ("lucid_solve[metric=transported]", (torch.float16,), ((128, 128),)),
)
"""Extensions of a cache by many tokens."""

FEW_AT_ONCE: Shipped = (
    ("lucid", (torch.bfloat16,), ((256, 256), (128, 128))),
    ("lucid", (torch.float32,), ((128, 128),)),
)
"""Extensions of a cache by a few tokens, of which there are as many rows as fit a tile."""

PROMPTS: Shipped = (
    ("gated_delta", (torch.bfloat16, torch.float32), ((128, 128),)),
    *((name, (torch.bfloat16,), ((128, 128),)) for name in ("gla", "kda")),
)
"""Extensions of states by many tokens, with their gradients, of which only the kernels that read
these states, or the gradients of new ones, differ from those of full calls."""

TOKENS, HEADS, BATCH, SLOTS, FEW, MANY = 4096, 16, 2, 64, 15, 256
DISTINGUISHING = (
    *("ROWS", "COLUMNS", "CHUNK", "TILE", "STEP", "BACKWARD", "BY_ROW", "PART"),
    *("KEYS", "BLOCK", "DECAY", "GATE_STEP", "HAS_BORDERS", "UNDECAYED", "PARTS"),
    "IS_STEP",
)
"""The constants of a kernel that depend on its configuration or select a code path."""
OPTIONAL = (
    *("erase", "right", "gates", "z", "d_u", "x", "reading", "erased_pairs"),
    *("softcap", "window", "bias", "slopes", "sink", "initial", "d_final", "is_close"),
)
"""Arguments that select a code path by being None or not."""
WIDE_SPILLS = 10400
"""Bytes that a thread may spill where rows are wider than 128. In float32 some kernels do; PaTH's
at 256 spill most, on compute capability 8.0."""
SPILLS = [
    # The next three spill on compute capability 8.0. The assembler keeps float16 to 128 registers.
    (8, r"at_border .* packed"),
    (32, r"key_value_gradient .* float16 "),
    (48, r"carry_moments .* float16 "),
    (4, r"_forward path\[flush=64\].* float32 "),
    # It spills where factors have 32 bits and a chunk 32 tokens.
    (96, r"_chunk_gradient "),
    # The next two spill on compute capability 9.0.
    (4, r"key_value_gradient path bfloat16 "),
    (24, r"d_inputs preconditioned_key"),
]
"""Bytes that a thread may spill in other kernels, by the kernel and the name of its variant."""
if triton.__version__.startswith("3.6."):  # Later versions spill less.
    SPILLS += [(64, r"d_inputs preconditioned_key"), (64, r"read_past lucid by 15 tokens float32 ")]


def variants(target: str) -> Iterator[Variant]:
    """Every kernel in every configuration: one variant for widths up to 128, one for wider rows."""
    yielded = set()
    is_amd = target.startswith("gfx")
    shipped = [
        (*call, options)
        for calls, options in (
            (CALLS, {}),
            (PACKED, {"is_packed": True}),
            (STEPS, {"new": 1}),
            (FEW_AT_ONCE, {"new": FEW}),
            (EXTENSIONS, {"new": MANY}),
            (PROMPTS, {"is_prompt": True}),
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
                    constants = tuple(launch.values.get(name) for name in DISTINGUISHING)
                    tuned = tuple(sorted(launch.options.items()))
                    is_wide = max(d, e) > 128
                    function = launch.function.module, launch.function.__name__
                    identity = (
                        *(function, dtype, _first_dtype(launch), constants, tuned, is_wide),
                        *(_is_packed(launch), *(_has(launch, name) for name in OPTIONAL)),
                        _is_of_blocks(launch),
                        # LUCID's right sides are float32 for new tokens after a cache.
                        _dtype_of(launch, "v"),
                    )
                    if identity not in yielded:
                        yielded.add(identity)
                        tokens = options.get("new", 1)
                        named = mechanism if tokens == 1 else f"{mechanism} by {tokens} tokens"
                        yield _variant(launch, named, dtype, d, e)


def _variant(launch: TritonLaunch, mechanism: str, dtype: torch.dtype, d: int, e: int) -> Variant:
    width = str(d) if d == e else f"{d}x{e}"
    packed = " packed" if _is_packed(launch) else ""
    named = f"{mechanism} {str(dtype).removeprefix('torch.')} {width}{packed}{_way(launch)}"
    kernel = f"{launch.function.__name__} {named} "
    limits = [bytes_spilt for bytes_spilt, name in SPILLS if re.match(name, kernel)]
    limit = max(limits, default=0) if max(d, e) <= 128 else WIDE_SPILLS
    return launch.variant(named)._replace(spill_limit=limit)


def _first_dtype(launch: TritonLaunch) -> torch.dtype:
    """The dtype of the first array: operands may be in the call's dtype or in another."""
    arguments = (a if isinstance(a, tuple) else (a,) for a in launch.arguments.values())
    return next(a.dtype for entries in arguments for a in entries if isinstance(a, torch.Tensor))


def _dtype_of(launch: TritonLaunch, name: str) -> torch.dtype | None:
    array = launch.values.get(name)
    array = array[0] if isinstance(array, tuple) else array
    return array.dtype if isinstance(array, torch.Tensor) else None


def _has(launch: TritonLaunch, name: str) -> bool:
    return launch.values.get(name) is not None


def _is_packed(launch: TritonLaunch) -> bool:
    return any(_has(launch, name) for name in ("segment", "segments"))


def _is_of_blocks(launch: TritonLaunch) -> bool:
    """Whether a kernel of PaTH's backward pass is launched for blocks, not for their chunks."""
    length = launch.values.get("length", 0)
    return isinstance(length, int) and length >= SMALLEST


def _way(launch: TritonLaunch) -> str:
    """The part of a variant's name that distinguishes a kernel's launches within one call."""
    is_backward = launch.values.get("BACKWARD", launch.values.get("BY_ROW"))
    is_backward = is_backward or (_has(launch, "z") and _has(launch, "y"))
    decay, gated = launch.values.get("DECAY"), launch.values.get("GATE_STEP")
    of_blocks = " of blocks" if _is_of_blocks(launch) else ""
    sizes = [(name, launch.values.get(name.upper())) for name in ("tile", "part")]
    name = (
        (" backward" if is_backward else "")
        + of_blocks
        + "".join(f" {n} {size}" for n, size in sizes if size)
    )
    if decay is not None:
        name += f" decay of {decay}"
    if "x" in launch.values and launch.values["x"] is None:
        name += " of values alone"
    if "erase_scores" in launch.values and launch.values.get("reading") is not None:
        name += " with factors"
    if any(_has(launch, each) for each in ("initial", "d_final")):
        name += " after states"
    if launch.values.get("COLUMNS") and _has(launch, "moments"):
        name += " with moments"
    if launch.values.get("d") == 1:
        name += " of one channel"
    return name + (f" width {gated}" if gated else "")


def launches(
    expression: str,
    dtype: torch.dtype,
    d: int,
    e: int,
    new: int = 0,
    is_packed: bool = False,
    is_prompt: bool = False,
) -> list[TritonLaunch]:
    """The launches of a call with its gradient, of a step by `new` tokens, or of a whole call after
    states."""
    mechanism = pa.parse(expression)
    is_group = len(mechanism.program.calls) > 1
    leaf = mechanism.program.leaves[0]
    assert isinstance(leaf, pa.Leaf)
    piece: Piece = Group(group_of(expression)) if is_group else leaf
    inputs = piece.inputs.extending() if new else piece.inputs
    sizes = {"b": BATCH, "h": HEADS, "n": HEADS, "u": HEADS, "c": TOKENS}
    sizes |= {"d": d, "e": e, "m": SLOTS}
    sizes |= {"t": new, "s": new} if new else {"t": TOKENS, "s": TOKENS}
    x = {name: _empty(pattern.shape(sizes), dtype) for name, pattern in inputs.items()}
    runner = KernelRunner(Triton(), piece)
    states = {
        key: _empty(pattern.shape(sizes), torch.float32 if slot.wide else dtype)
        for key, (slot, pattern) in piece.program.slots.items()
    }
    with recorded() as recorded_launches:
        if new:
            positions = _empty((BATCH, new), torch.int64)
            slots = _empty((BATCH, TOKENS + new), torch.int64)
            runner.step(states, x, Frame(positions, slots, None, slots.bool()))
            return recorded_launches
        if is_prompt:
            out, _ = runner.step(states, x, Frame(None, None))
            runner.step_backward(states, x, Frame(None, None), out, states)
            return recorded_launches
        position = _empty((1, TOKENS), torch.int64)
        ids = _empty((BATCH, TOKENS), torch.int64) if is_packed else None
        frame = Frame(position, position, None, None, ids, ids)
        out, residuals = runner.forward(x, frame)
        runner.backward(x, frame, out, residuals, torch.empty_like(out))
        if "bias" in x:  # A bias of all sequences has its gradient from another kernel.
            x["bias"] = x["bias"][:1]
            runner.backward(x, frame, out, residuals, torch.empty_like(out))
        if isinstance(piece, Stateful):
            by_tokens = {name for name, pattern in inputs.items() if set("ts") & {*pattern.letters}}
            last = {n: array[:, -1:] if n in by_tokens else array for n, array in x.items()}
            runner.step(states, last, Frame(None, None))
    return recorded_launches


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
