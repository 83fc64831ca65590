"""Benchmark cases: what is measured, each under a name.

A case is a mechanism, its sizes and a kind of work, on one array library. It has no threshold to
pass or fail: a case declares a measurement, and a record holds its result.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import precondattn as pa
from precondattn_conformance import libraries
from precondattn_conformance.inputs import CallLayout

if TYPE_CHECKING:
    from precondattn_conformance.bench.peers import TimedPeer

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
    backend: str | None = None
    """The requested backend, or several in order of preference: `"mine,torch"`."""
    device: str | None = None

    @property
    def parsed(self) -> pa.Mechanism:
        return pa.parse(self.mechanism)

    @property
    def arrays(self) -> libraries.Library:
        """The array library on the device."""
        return libraries.named(self.library, self.device)

    @property
    def input_sizes(self) -> dict[str, int]:
        """The sizes of the call's inputs, by letter."""
        inputs, sizes = self.parsed.inputs, self.call_layout.sizes
        return inputs.sizes(self.mechanism, {x: p.shape(sizes) for x, p in inputs.items()})

    @property
    def call_layout(self) -> CallLayout:
        """The sizes of the call: decoding needs one token more than its context."""
        more = 1 if self.work == "decode" else 0
        return self.layout._replace(t=self.layout.t + more, s=self.layout.s + more)


def layout(t: int = 4096, h: int = 8, n: int | None = None, d: int = 64, e: int = 0) -> CallLayout:
    """The sizes of one sequence; without n there are as many key/value heads as query heads."""
    return CallLayout("bench", b=1, t=t, s=t, h=h, n=n or h, d=d, e=e or d, m=64, values_per_head=1)


_WIDE = layout(d=128)
_SMALL = layout(t=8, h=2, d=16)
_CACHED = layout(t=1024)


def _small(
    name: str, mechanism: str, work: str, sizes: CallLayout, *peers: str, library: str = "torch"
) -> BenchCase:
    """A call so small that most of its time may pass outside of the arithmetic."""
    return BenchCase(f"overhead_{name}", mechanism, work, sizes, library, peers=peers, calls=100)


def _both(
    name: str, mechanism: str, sizes: CallLayout, *peers: str, library: str = "torch"
) -> tuple[BenchCase, ...]:
    """A case of the forward pass, and one with the gradient."""
    forward = BenchCase(name, mechanism, "forward", sizes, library, peers=peers)
    return forward, replace(forward, name=f"{name}_backward", work="forward_backward")


def _peaks(name: str, mechanism: str, sizes: CallLayout, library: str = "torch") -> BenchCase:
    return BenchCase(name, mechanism, "memory", sizes, library, peers=())


_MEMORY = ("softmax", "lucid", "laser", "path", "gated_delta", "ccq(gated_delta)", "row_normalized")
_LONG = tuple(
    replace(_peaks(f"long_{name}", name, layout(t=65536, h=2)), multiples=(1,)) for name in _MEMORY
)
_PACKED = tuple(
    replace(case, packed=True)
    for library, prefix in (("torch", ""), ("numpy", "numpy_"), ("jax", "jax_"))
    for name in ("softmax", "lucid", "laser", "gated_delta", "ccq(gated_delta)")
    for case in _both(
        f"{prefix}packed_{name}", name, layout(t=128)._replace(b=32), "batch", library=library
    )
)

_SYMMETRIC = "lucid[rho=0.5](softmax[causal=false])"
_WINDOW = "softmax[window=256]"

# Chosen by hand: what is measured beside peers. All others have cases of their own in `declared`.
COMPARED = (
    BenchCase("softmax", "softmax", "forward", layout(), peers=("sdpa",)),
    BenchCase(
        "window_backward", _WINDOW, "forward_backward", layout(t=2048), peers=("masked_sdpa",)
    ),
    BenchCase("lucid", "lucid", "forward", layout(), peers=("sdpa",)),
    BenchCase("lucid_one_kv_head", "lucid", "forward", layout(n=1), peers=("sdpa",)),
    BenchCase("lucid_naive", "lucid", "forward", layout(), peers=("naive_lucid",)),
    BenchCase("lucid_backward", "lucid", "forward_backward", layout(), peers=("sdpa",)),
    *_both("laser", "laser", layout(), "sdpa", "base"),
    BenchCase("row_normalized", "row_normalized", "forward", layout(), peers=("base", "sdpa")),
    *_both("gated_delta", "gated_delta", _WIDE, "transformers", "fla"),
    *_both("kda", "kda", _WIDE, "gated_delta", "naive_fla", "fla"),
    *_both("jax_kda", "kda", _WIDE, "gated_delta", library="jax"),
    *_both("gdn2", "gdn2", _WIDE, "kda", "naive_fla"),
    *_both("comba", "comba", _WIDE, "gated_delta", "naive_fla"),
    *_both("delta_product", "delta_product", _WIDE, "gated_delta", "naive_fla"),
    *_both("dplr", "dplr", _WIDE, "kda"),
    *_both("atk_gated_delta", "atk(gated_delta)", _WIDE, "base", "naive_fla"),
    *_both("atk_kda", "atk(kda)", _WIDE, "base", "naive_fla"),
    *_both("ccq_gated_delta", "ccq(gated_delta)", _WIDE, "base"),
    *_both("ccq_gla", "ccq(gla)", _WIDE, "base"),
    BenchCase("path", "path", "forward", layout(), peers=("sdpa", "fla")),
    BenchCase("deltaformer", "deltaformer", "forward", layout(), peers=("sdpa", "naive_fla")),
    BenchCase("deltaformer_backward", "deltaformer", "forward_backward", layout(), peers=("sdpa",)),
    *_both("symmetric_lucid", _SYMMETRIC, layout(h=4), "sdpa"),
    *_both("jax_symmetric_lucid", _SYMMETRIC, layout(h=4), "sdpa", library="jax"),
    *_both("mesa", "mesa", layout(), "base", "naive_fla"),
    BenchCase("jax_deltaformer", "deltaformer", "forward", layout(), "jax", peers=("sdpa", "xla")),
    *_both("nystrom", "nystrom", layout(), "transformers"),
    BenchCase("ssd", "ssd", "forward", _WIDE, peers=("naive_fla",)),
    BenchCase("numpy_lucid", "lucid", "forward", layout(t=2048), "numpy", peers=("base",)),
    BenchCase("numpy_softmax", "softmax", "forward", layout(t=2048), "numpy", peers=("sdpa",)),
    BenchCase("lucid_decode", "lucid", "decode", layout(t=16384), peers=("sdpa",)),
    BenchCase("jax_softmax", "softmax", "forward", layout(), "jax", peers=("sdpa", "xla")),
    *_both("jax_lucid", "lucid", layout(), "base", "sdpa", library="jax"),
    BenchCase("jax_laser", "laser", "forward", layout(), "jax", peers=("base",)),
    BenchCase("jax_path", "path", "forward", layout(), "jax", peers=("torch",)),
    *_both("jax_gated_delta", "gated_delta", _WIDE, "torch", library="jax"),
    *(_peaks(f"memory_{name}", name, layout(h=2)) for name in _MEMORY),
    *(_peaks(f"jax_memory_{name}", name, layout(h=2), "jax") for name in _MEMORY),
    *_LONG,
    *_PACKED,
    _small("softmax", "softmax", "forward", _SMALL, "sdpa"),
    _small("lucid", "lucid", "forward", _SMALL, "naive_lucid"),
    _small("ccq_gla", "ccq(gla)", "forward", _SMALL, "base"),
    _small("gated_delta_decode", "gated_delta", "decode", layout(t=64, d=128)),
    _small("softmax_decode", "softmax", "decode", _CACHED, "sdpa"),
    _small("lucid_decode", "lucid", "decode", _CACHED, "sdpa"),
    _small("numpy_softmax", "softmax", "forward", _SMALL, "sdpa", library="numpy"),
    _small("jax_softmax", "softmax", "forward", _SMALL, "xla", library="jax"),
)


def declared() -> tuple[BenchCase, ...]:
    """Every case: those of `COMPARED`, and a forward and a memory case for each other mechanism.

    A new base or preconditioner, also a third-party one, has cases as soon as it is registered.
    """
    cases = {case.name: case for case in COMPARED}
    for name in pa.mechanisms():
        cases.setdefault(name, BenchCase(name, name, "forward", layout()))
        cases.setdefault(f"memory_{name}", _peaks(f"memory_{name}", name, layout(h=2)))
    return tuple(cases.values())


class Columns(NamedTuple):
    """The parameters of a row in pytest-benchmark, all of them texts."""

    mechanism: str
    """The mechanism that is compared. A peer may compute another one, as `sdpa` does."""
    library: str
    backend: str
    """A backend as it was named, `default`, or the name of a peer."""
    device: str
    work: str
    sizes: str
    dtype: str

    @property
    def group(self) -> str:
        """The name of the table in which the row stands, beside other libraries and devices."""
        return f"{self.mechanism} {self.work} {self.sizes} {self.dtype}"

    def id(self, computed: str = "") -> str:
        """The row in the brackets of a test's name; `computed` is what a peer computes."""
        parts = self._asdict()
        if computed not in ("", self.mechanism, self.backend):
            parts["backend"] = f"{self.backend}({computed})"
        if self.dtype == "float32":
            del parts["dtype"]
        return "-".join(parts.values())


def columns_of(case: BenchCase, peer: TimedPeer | None = None) -> Columns:
    """The columns of a case, or of a peer beside it."""
    library = (peer and peer.library) or case.library
    return Columns(
        str(case.parsed),
        library,
        peer.name if peer else case.backend or "default",
        device_on(library, case.device),
        f"packed_{case.work}" if case.packed else case.work,
        sizes_of(case),
        case.dtype,
    )


def device_on(library: str, device: str | None) -> str:
    """The device of a library's arrays if this one is requested: NumPy's are always on a CPU."""
    if library in ("numpy", "array_api_strict"):
        return "cpu"
    return "cuda" if library == "cupy" else device or "cpu"


def sizes_of(case: BenchCase) -> str:
    """The sizes as `--sizes` takes them: `t=1024,h=4,d=64`.

    A batch of one, as many key heads as query heads, and values as wide as keys are not written.
    """
    sizes = case.layout.sizes
    has_slots = any("m" in pattern.letters for pattern in case.parsed.inputs.values())
    left_out = {"b": sizes["b"] == 1, "n": sizes["n"] == sizes["h"], "m": not has_slots}
    left_out["e"] = sizes["e"] == sizes["d"]
    return ",".join(f"{x}={sizes[x]}" for x in "bthndem" if not left_out.get(x))
