"""flash-linear-attention's kernels, in Triton on a GPU, as peers.

Their functions have our names of inputs, our layouts and our default scale; decays are logarithms.
What differs is given as each of them demands:

* linear attention, retention and GLA have one number of heads, so keys, values and gates are
  repeated for each query head, and for the delta rule queries and keys for each value head;
* PaTH takes its directions and strengths in float32, in which they are as they were rounded before;
* the delta rule has no float32.

They were compared with the functions of version 0.6.0.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import precondattn as pa
from precondattn.arrays import Array, Arrays
from precondattn_conformance.bench.cases import BenchCase
from precondattn_conformance.bench.computation import Computation, entry_for
from precondattn_conformance.libraries import HALF

NAME = "fla"


class FlaKernel(NamedTuple):
    """A function of flash-linear-attention, and how it is called."""

    module: str
    function: str
    arguments: Callable[[Arrays], Arrays] = dict
    """Its arguments, from our inputs."""
    dtypes: tuple[str, ...] = (*HALF, "float32")


def _repeated(x: Arrays, names: str, heads: int) -> Arrays:
    """The inputs, with so many heads in each of `names`."""
    more = {
        name: x[name].repeat_interleave(heads // x[name].shape[2], 2)
        for name in names
        if name in x and x[name].shape[2] != heads
    }
    return {**x, **more}


def _for_query_heads(x: Arrays) -> Arrays:
    return _repeated(x, "kvg", x["q"].shape[2])


def _of_linear(x: Arrays) -> Arrays:
    return {**_for_query_heads(x), "normalize": False}


def _for_value_heads(x: Arrays) -> Arrays:
    return _repeated(x, "qk", x["v"].shape[2])


def _of_path(x: Arrays) -> Arrays:
    return {**x, "w": x["w"].float(), "beta": x["beta"].float()}


WIDEST_WRONG_TILE = 64
"""The key width up to which fla's refusal on Hopper is right."""


def _of_gated_delta(x: Arrays) -> Arrays:
    """The inputs themselves. It lets the gradient run on Hopper where only the width is in doubt.

    With Triton from 3.4 to 3.7.0, fla refuses this gradient on Hopper at every width. What is wrong
    there is a product in tiles of 64 key channels, and wider keys have tiles of 128 (issue 640 of
    flash-linear-attention). Its module asks a flag of its own, which is set for wider keys only.
    Gradients are compared with the oracle before they are timed.
    """
    chunk_o: Any = import_module("fla.ops.common.chunk_o")
    if hasattr(chunk_o, "TRITON_ABOVE_3_7_1"):
        is_mended = import_module("fla.utils").TRITON_ABOVE_3_7_1
        chunk_o.TRITON_ABOVE_3_7_1 = is_mended or x["q"].shape[-1] > WIDEST_WRONG_TILE
    return x


KERNELS = {
    "linear": FlaKernel("fla.ops.linear_attn", "chunk_linear_attn", _of_linear),
    "retention": FlaKernel("fla.ops.retention", "chunk_retention", _for_query_heads),
    "gla": FlaKernel("fla.ops.gla", "chunk_gla", _for_query_heads),
    "gsa": FlaKernel("fla.ops.gsa", "chunk_gsa"),
    "delta": FlaKernel("fla.ops.delta_rule", "chunk_delta_rule", _for_value_heads, HALF),
    "gated_delta": FlaKernel("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", _of_gated_delta),
    "kda": FlaKernel("fla.ops.kda", "chunk_kda"),
    "path": FlaKernel("fla.ops.path_attn.parallel", "parallel_path_attn", _of_path),
}
"""By the mechanism's expression in its shortest form."""


def lack(case: BenchCase, device: str) -> str:
    """Why the kernels of a case are not measured; empty if they are."""
    if find_spec("fla") is None:
        return "flash-linear-attention is not installed"
    if device == "cpu":
        return f"flash-linear-attention needs a GPU; this runs on {device}"
    if case.work == "decode":
        return "has no decoding"
    mechanism = pa.parse(case.mechanism)
    kernel = entry_for(KERNELS, mechanism)
    if kernel is None or case.dtype not in kernel.dtypes:
        return f"flash-linear-attention's {mechanism} does not support {case.dtype}"
    return ""


def fla_kernel(mechanism: pa.Mechanism) -> Computation:
    """What the kernels of a mechanism compute."""
    kernel = entry_for(KERNELS, mechanism)
    assert kernel is not None  # The peer is one of those that have it.
    function = getattr(import_module(kernel.module), kernel.function)

    def forward(**x: Array) -> Array:
        return function(**kernel.arguments(x))[0]

    return Computation(NAME, mechanism, forward)
