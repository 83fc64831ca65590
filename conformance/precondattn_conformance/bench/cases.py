"""Benchmark cases: what is measured, each under a name.

A case is a mechanism, its sizes and a kind of work, on one array library. It has no threshold to
pass or fail: a case declares a measurement, and a record holds its result.
"""

from __future__ import annotations

from dataclasses import dataclass

import precondattn as pa
from precondattn_conformance.inputs import CallLayout

WORKS = ("forward", "forward_backward", "decode", "memory")
"""`decode` is one new token after a cache of t tokens. `memory` is the peak of a forward and a
backward pass at t tokens and at its multiples; it is not timed."""

SIZES = ("b", "t", "h", "n", "d", "e", "m")
"""The sizes that can be set; there are as many keys as queries."""


@dataclass(frozen=True)
class BenchCase:
    """One measurement."""

    name: str
    mechanism: str
    work: str
    layout: CallLayout
    library: str = "torch"
    dtype: str = "float32"
    peers: tuple[str, ...] | None = None
    """The peers to measure beside; None is every one that fits."""
    calls: int = 1
    """The number of calls in a round, of whose time one call's is the mean. More than 1 for calls
    that are short beside the clock."""
    multiples: tuple[int, ...] = (1, 2, 4)
    """The multiples of t at which the peak memory is measured."""
    packed: bool = False
    """Whether the b sequences of t tokens are packed into one row; the peer `batch` has them as a
    batch."""

    def text(self) -> str:
        """A description in one line."""
        sizes = " ".join(f"{letter}{getattr(self.layout, letter)}" for letter in "bthnde")
        packed = ", packed" if self.packed else ""
        return f"{self.mechanism} {self.work}{packed}, {sizes}, {self.library} {self.dtype}"


def layout(t: int = 4096, h: int = 8, n: int | None = None, d: int = 64, e: int = 0) -> CallLayout:
    """The sizes of one sequence; without n there are as many key/value heads as query heads."""
    return CallLayout("bench", b=1, t=t, s=t, h=h, n=n or h, d=d, e=e or d, m=64, values_per_head=1)


_SMALL = layout(t=8, h=2, d=16)
CALLS = 100

OVERHEAD = (
    BenchCase("overhead_softmax", "softmax", "forward", _SMALL, peers=("sdpa",), calls=CALLS),
    BenchCase("overhead_lucid", "lucid", "forward", _SMALL, peers=("naive_lucid",), calls=CALLS),
    BenchCase("overhead_ccq_gla", "ccq(gla)", "forward", _SMALL, peers=("base",), calls=CALLS),
    BenchCase(
        "overhead_gated_delta_decode",
        "gated_delta",
        "decode",
        layout(t=64, d=128),
        peers=(),
        calls=CALLS,
    ),
    BenchCase(
        "overhead_softmax_decode",
        "softmax",
        "decode",
        layout(t=1024),
        peers=("sdpa",),
        calls=CALLS,
    ),
    BenchCase(
        "overhead_lucid_decode",
        "lucid",
        "decode",
        layout(t=1024),
        peers=("sdpa",),
        calls=CALLS,
    ),
    BenchCase(
        "overhead_numpy_softmax",
        "softmax",
        "forward",
        _SMALL,
        "numpy",
        peers=("sdpa",),
        calls=CALLS,
    ),
    BenchCase(
        "overhead_jax_softmax", "softmax", "forward", _SMALL, "jax", peers=("xla",), calls=CALLS
    ),
)  # fmt: skip
"""Calls so small that most of their time may pass outside of the arithmetic."""

_MEMORY = ("softmax", "lucid", "laser", "path", "gated_delta", "ccq(gated_delta)", "row_normalized")

_OF_PAIRS = tuple(
    BenchCase(
        ("" if library == "torch" else f"{library}_") + f"pairs_{name}{suffix}",
        mechanism,
        "memory",
        layout(t=16384)._replace(mask=mask),
        library,
        dtype,
        peers=(),
        multiples=(1,),
    )
    for library, dtype, suffix in (
        ("torch", "float32", ""),
        ("torch", "bfloat16", "_bfloat16"),
        ("numpy", "float32", ""),
        ("jax", "float32", ""),
    )
    for name, mechanism, mask in (
        ("none", "softmax", None),
        ("slopes", "softmax[distance=slopes]", None),
        ("buckets", "softmax[distance=buckets]", None),
        ("prefix", "softmax", "prefix"),
        ("attn_mask", "softmax", "attn_mask"),
    )
)
"""Distances and masks of pairs, beside plain softmax. An attn_mask is an input of a byte a pair."""

_SHORT = layout(t=128)._replace(b=32)

_PACKED = tuple(
    BenchCase(
        ("" if library == "torch" else f"{library}_") + f"packed_{name}{suffix}",
        name,
        work,
        _SHORT,
        library,
        peers=("batch",),
        packed=True,
    )
    for library in ("torch", "numpy", "jax")
    for name in ("softmax", "lucid", "laser", "gated_delta", "ccq(gated_delta)")
    for work, suffix in (("forward", ""), ("forward_backward", "_backward"))
)

# Chosen by hand: what is measured beside peers. All others have cases of their own in `declared`.
COMPARED = (
    BenchCase("softmax", "softmax", "forward", layout(), peers=("sdpa",)),
    BenchCase(
        "window_backward",
        "softmax[window=256]",
        "forward_backward",
        layout(t=2048),
        peers=("masked_sdpa",),
    ),
    BenchCase("lucid", "lucid", "forward", layout(), peers=("sdpa",)),
    BenchCase("lucid_one_kv_head", "lucid", "forward", layout(n=1), peers=("sdpa",)),
    BenchCase("lucid_naive", "lucid", "forward", layout(), peers=("naive_lucid",)),
    BenchCase("lucid_backward", "lucid", "forward_backward", layout(), peers=("sdpa",)),
    BenchCase("laser", "laser", "forward", layout(), peers=("sdpa", "base")),
    BenchCase("laser_backward", "laser", "forward_backward", layout(), peers=("sdpa", "base")),
    BenchCase("row_normalized", "row_normalized", "forward", layout(), peers=("base", "sdpa")),
    BenchCase(
        "gated_delta", "gated_delta", "forward", layout(d=128), peers=("transformers", "fla")
    ),
    BenchCase(
        "gated_delta_backward",
        "gated_delta",
        "forward_backward",
        layout(d=128),
        peers=("transformers", "fla"),
    ),
    *(
        BenchCase(f"{prefix}kda{suffix}", "kda", work, layout(d=128), library, peers=peers)
        for prefix, library, peers in (
            ("", "torch", ("gated_delta", "naive_fla", "fla")),
            ("jax_", "jax", ("gated_delta",)),
        )
        for suffix, work in (("", "forward"), ("_backward", "forward_backward"))
    ),
    *(
        BenchCase(f"{name}{suffix}", text, work, layout(d=128), peers=peers)
        for name, text, peers in (
            ("gdn2", "gdn2", ("kda", "naive_fla")),
            ("comba", "comba", ("gated_delta", "naive_fla")),
            ("delta_product", "delta_product", ("gated_delta", "naive_fla")),
            ("dplr", "dplr", ("kda",)),
            ("atk_gated_delta", "atk(gated_delta)", ("base", "naive_fla")),
            ("atk_kda", "atk(kda)", ("base", "naive_fla")),
        )
        for suffix, work in (("", "forward"), ("_backward", "forward_backward"))
    ),
    *(
        BenchCase(f"ccq_{base}{suffix}", f"ccq({base})", work, layout(d=128), peers=("base",))
        for base in ("gated_delta", "gla")
        for suffix, work in (("", "forward"), ("_backward", "forward_backward"))
    ),
    BenchCase("path", "path", "forward", layout(), peers=("sdpa", "fla")),
    BenchCase("deltaformer", "deltaformer", "forward", layout(), peers=("sdpa", "naive_fla")),
    BenchCase(
        "deltaformer_backward", "deltaformer", "forward_backward", layout(), peers=("sdpa",)
    ),
    *(
        BenchCase(
            f"{prefix}symmetric_lucid{suffix}",
            "lucid[rho=0.5](softmax[causal=false])",
            work,
            layout(h=4),
            library,
            peers=("sdpa",),
        )
        for prefix, library in (("", "torch"), ("jax_", "jax"))
        for suffix, work in (("", "forward"), ("_backward", "forward_backward"))
    ),
    *(
        BenchCase(f"mesa{suffix}", "mesa", work, layout(), peers=("base", "naive_fla"))
        for suffix, work in (("", "forward"), ("_backward", "forward_backward"))
    ),
    BenchCase("jax_deltaformer", "deltaformer", "forward", layout(), "jax", peers=("sdpa", "xla")),
    *(
        BenchCase(f"nystrom{suffix}", "nystrom", work, layout(), peers=("transformers",))
        for suffix, work in (("", "forward"), ("_backward", "forward_backward"))
    ),
    BenchCase("ssd", "ssd", "forward", layout(d=128), peers=("naive_fla",)),
    BenchCase("numpy_lucid", "lucid", "forward", layout(t=2048), "numpy", peers=("base",)),
    BenchCase("numpy_softmax", "softmax", "forward", layout(t=2048), "numpy", peers=("sdpa",)),
    BenchCase("lucid_decode", "lucid", "decode", layout(t=16384), peers=("sdpa",)),
    BenchCase("jax_softmax", "softmax", "forward", layout(), "jax", peers=("sdpa", "xla")),
    BenchCase("jax_lucid", "lucid", "forward", layout(), "jax", peers=("base", "sdpa")),
    BenchCase(
        "jax_lucid_backward", "lucid", "forward_backward", layout(), "jax", peers=("base", "sdpa")
    ),
    BenchCase("jax_laser", "laser", "forward", layout(), "jax", peers=("base",)),
    BenchCase("jax_path", "path", "forward", layout(), "jax", peers=("torch",)),
    BenchCase("jax_gated_delta", "gated_delta", "forward", layout(d=128), "jax", peers=("torch",)),
    BenchCase(
        "jax_gated_delta_backward",
        "gated_delta",
        "forward_backward",
        layout(d=128),
        "jax",
        peers=("torch",),
    ),
    *(
        BenchCase(f"memory_{name}", name, "memory", layout(h=2), peers=())
        for name in _MEMORY
    ),
    *(
        BenchCase(f"jax_memory_{name}", name, "memory", layout(h=2), "jax", peers=())
        for name in _MEMORY
    ),
    *(
        BenchCase(f"long_{name}", name, "memory", layout(t=65536, h=2), peers=(), multiples=(1,))
        for name in _MEMORY
    ),
    *_OF_PAIRS,
    *_PACKED,
    *OVERHEAD,
)  # fmt: skip


def declared() -> tuple[BenchCase, ...]:
    """Every case: those of `COMPARED`, and a forward and a memory case for each other mechanism.

    A new base or preconditioner, also a third-party one, has cases as soon as it is registered.
    """
    cases = {case.name: case for case in COMPARED}
    for name in pa.mechanisms():
        cases.setdefault(name, BenchCase(name, name, "forward", layout()))
        memory = BenchCase(f"memory_{name}", name, "memory", layout(h=2), peers=())
        cases.setdefault(memory.name, memory)
    return tuple(cases.values())
