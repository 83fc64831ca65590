"""Peers: what a user would run instead, or the base that a mechanism adds work to.

The page on benchmarks has a table of what each computes, and where.

`sdpa` is the peer of every mechanism that contains softmax attention, also of LASER and PaTH, which
compute something else. A peer is compared with the oracle of what it computes; a wrong one is not
timed.

A peer runs in its own array library on the same numbers, so JAX can be compared with PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np

import precondattn as pa
from precondattn.arrays import Array, Arrays
from precondattn_conformance import libraries
from precondattn_conformance.bench.adapters import KERNELS, NAIVE, OF_TRANSFORMERS
from precondattn_conformance.bench.cases import BenchCase
from precondattn_conformance.bench.computation import Computation, ours, token_count
from precondattn_conformance.bench.naive_lucid import naive_lucid
from precondattn_conformance.libraries import Library

SOFTMAX = pa.Softmax()


class TimedPeer(NamedTuple):
    """An implementation to compare with."""

    name: str
    fits: Callable[[pa.Mechanism], bool]
    """Whether it is a peer of this mechanism."""
    make: Callable[[pa.Mechanism, str | None], Computation]
    """The computation for a mechanism; the backend is used if the peer is one of ours."""
    library: str | None = "torch"
    """The array library of the peer; None for that of the case."""
    lacks: Callable[[BenchCase, str], str] = lambda case, device: ""
    """Why it can not run this case on this device; empty if it can."""


def peers_of(case: BenchCase) -> list[TimedPeer]:
    """The peers of a case: those that it names, or else all that fit.

    Raises
    ------
    ValueError
        if a peer does not exist.
    """
    mechanism = pa.parse(case.mechanism)
    for name in case.peers or ():
        if name not in [peer.name for peer in PEERS]:
            known = ", ".join(peer.name for peer in PEERS)
            raise ValueError(f"unknown peer {name!r}; known are {known}")
    wanted = [peer.name for peer in PEERS] if case.peers is None else case.peers
    fitting = [peer for peer in PEERS if peer.name in wanted and peer.fits(mechanism)]
    return [peer for peer in fitting if case.packed or peer.name != "batch"]


def computed_by(peer: TimedPeer, mechanism: pa.Mechanism) -> pa.Mechanism:
    """What a peer computes beside a mechanism: the same, unless it is plain attention or a base."""
    if peer.fits is _is_softmax_inside:
        return SOFTMAX if mechanism.offers.causal else pa.Softmax(causal=False)
    ours: dict[str, pa.Mechanism] = {"gated_delta": pa.GatedDelta(), "kda": pa.KDA()}
    if peer.name == "base":
        base: pa.Mechanism = mechanism.base  # type: ignore[attr-defined]
        return base
    return ours.get(peer.name, mechanism)


def _is_softmax_inside(m: pa.Mechanism) -> bool:
    return any(leaf.name in ("softmax", "path", "deltaformer") for leaf in m.program.leaves)


def _no_decoding(case: BenchCase, device: str) -> str:
    return "has no decoding" if case.work == "decode" else ""


def lacks(peer: TimedPeer, case: BenchCase, device: str) -> str:
    """Why a peer can not run this case on this device; empty if it can."""
    name = peer.library or case.library
    library = libraries.named(name)
    if not library.is_installed():
        return f"{name} is not installed"
    if case.dtype not in library.dtypes:
        return f"{name} is not measured in {case.dtype}"
    return peer.lacks(case, device)


# PyTorch's own attention.


def sdpa(*, causal: bool = True) -> Callable[..., Array]:
    """Softmax attention by `scaled_dot_product_attention`, from (batch, time, heads, …)."""
    from torch.nn.functional import scaled_dot_product_attention

    def attention(q: Array, k: Array, v: Array) -> Array:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        grouped = q.shape[1] != k.shape[1]
        out = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
        return out.transpose(1, 2)

    return attention


def _sdpa(*, causal: bool) -> Computation:
    if causal:
        return Computation("sdpa", SOFTMAX, sdpa(), decoder=SdpaDecoder)
    return Computation("sdpa", pa.Softmax(causal=False), sdpa(causal=False))


def _masked_sdpa(mechanism: pa.Mechanism, backend: str | None) -> Computation:
    """SDPA with the window as a boolean mask, which is made before the call."""
    from torch.nn.functional import scaled_dot_product_attention

    window = mechanism.window  # type: ignore[attr-defined]

    @cache
    def visible(tokens: int, device: object) -> Array:
        import torch

        i = torch.arange(tokens, device=device)
        behind = i[:, None] - i
        return (behind >= 0) & (behind < window)

    def attention(q: Array, k: Array, v: Array) -> Array:
        mask, grouped = visible(q.shape[1], q.device), q.shape[2] != k.shape[2]
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
        return out.transpose(1, 2)

    return Computation("masked_sdpa", mechanism, attention)


def _sdpa_by(kernel: str) -> Callable[..., Array]:
    """`sdpa` by the kernel of this name in `torch.nn.attention.SDPBackend`, or an error."""

    def attention(q: Array, k: Array, v: Array) -> Array:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(getattr(SDPBackend, kernel)):
            return sdpa()(q, k, v)

    return attention


def _lacks_gpu_kernel(case: BenchCase, device: str) -> str:
    if device == "cpu":
        return f"is a kernel for GPUs; this runs on {device}"
    if case.dtype not in libraries.HALF:
        return f"supports half precision, not {case.dtype}"
    return _no_decoding(case, device)


class SdpaDecoder:
    """Decoding by SDPA on keys and values that are already stored, heads first."""

    def __init__(self, library: Library, dtype: str, inputs: Arrays) -> None:
        from torch.nn.functional import scaled_dot_product_attention

        self.attention = scaled_dot_product_attention
        self.inputs, self.library, self.dtype = inputs, library, dtype
        self.context = token_count(SOFTMAX, inputs) - 1
        arrays = {name: library.array(array, dtype) for name, array in inputs.items()}
        self.new = {
            name: array[:, -1:].transpose(1, 2).contiguous() for name, array in arrays.items()
        }
        self.keys, self.values = (arrays[name].transpose(1, 2).contiguous() for name in "kv")

    def fill(self) -> None:
        """Nothing to do: keys and values are already stored."""

    def reset(self) -> None:
        """Nothing to do: every step writes the same slot."""

    def step(self) -> Array:
        end = self.context + 1
        self.keys[:, :, self.context : end] = self.new["k"]
        self.values[:, :, self.context : end] = self.new["v"]
        k, v = self.keys[:, :, :end], self.values[:, :, :end]
        grouped = self.new["q"].shape[1] != k.shape[1]
        return self.attention(self.new["q"], k, v, enable_gqa=grouped).transpose(1, 2)

    def oracle_step(self) -> np.ndarray:
        rounded = {n: self.library.numpy(self.library.array(a, self.dtype))
                   for n, a in self.inputs.items()}  # fmt: skip
        rounded["q"] = rounded["q"][:, -1:]
        return np.asarray(SOFTMAX(**rounded, backend="reference"))


# JAX's own attention.


def _jax_attention_by(implementation: str) -> Callable[..., Array]:
    """Causal softmax attention by `jax.nn.dot_product_attention`."""

    def attention(q: Array, k: Array, v: Array) -> Array:
        import jax

        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)

    return attention


def _transformers(mechanism: pa.Mechanism, backend: str | None) -> Computation:
    """The function of Transformers; Nyströmformer starts its inverse from the batch."""
    if not isinstance(mechanism, pa.Nystrom):
        return OF_TRANSFORMERS.computation(mechanism)
    same = replace(mechanism, start="batch")
    function = OF_TRANSFORMERS.adapter(mechanism).function_of(same)
    return Computation("transformers", same, function)


def _base(mechanism: pa.Mechanism, backend: str | None) -> Computation:
    return ours(mechanism.base, backend, "base")  # type: ignore[attr-defined]


def _adds_to_gated_delta(m: pa.Mechanism) -> bool:
    """Whether it is a gated delta rule, with gates for each channel, another key or more steps."""
    r = m.recurrence
    if r is None or r.rule != "delta" or r.gate is None:
        return False
    return r.strength == "scalar" and r != pa.GatedDelta().recurrence


def _adds_to_kda(m: pa.Mechanism) -> bool:
    """Whether it corrects a state with gates for each channel, by more than one strength."""
    r = m.recurrence
    if r is None or r.gate != "channel" or r.is_diagonal:
        return False
    return r.strength != "scalar"


def _again_in_torch(case: BenchCase, device: str) -> str:
    return "is the contender itself" if case.library == "torch" else ""


def _named(name: str, attention: Callable[..., Array]) -> Callable[..., Computation]:
    """The maker of causal softmax attention by a function."""
    return lambda mechanism, backend: Computation(name, SOFTMAX, attention)


def _of(mechanism: pa.Mechanism, name: str) -> Callable[..., Computation]:
    """The maker of a mechanism of ours beside another one."""
    return lambda other, backend: ours(mechanism, backend, name)


PEERS = (
    TimedPeer("sdpa", _is_softmax_inside, lambda m, backend: _sdpa(causal=m.offers.causal)),
    TimedPeer(
        "masked_sdpa",
        lambda m: m == pa.Softmax(window=getattr(m, "window", None) or 1),
        _masked_sdpa,
        lacks=_no_decoding,
    ),
    *(
        TimedPeer(name, _is_softmax_inside, _named(name, of(kernel)), library, lack)
        for name, of, kernel, library, lack in (
            ("flash_sdpa", _sdpa_by, "FLASH_ATTENTION", "torch", _lacks_gpu_kernel),
            ("cudnn_sdpa", _sdpa_by, "CUDNN_ATTENTION", "torch", _lacks_gpu_kernel),
            ("xla", _jax_attention_by, "xla", "jax", _no_decoding),
            ("cudnn", _jax_attention_by, "cudnn", "jax", _lacks_gpu_kernel),
        )
    ),
    TimedPeer(
        "naive_lucid",
        lambda m: str(m) == "lucid",
        lambda m, backend: Computation("naive_lucid", m, naive_lucid),
        lacks=_no_decoding,
    ),
    *(
        TimedPeer(each.name, each.fits, make, lacks=each.lack)
        for each, make in (
            (OF_TRANSFORMERS, _transformers),
            (KERNELS, KERNELS.computation),
            (NAIVE, NAIVE.computation),
        )
    ),
    TimedPeer("gated_delta", _adds_to_gated_delta, _of(pa.GatedDelta(), "gated_delta"), None),
    TimedPeer("kda", _adds_to_kda, _of(pa.KDA(), "kda"), None),
    TimedPeer("base", lambda m: m.role == "preconditioner", _base, None),
    TimedPeer("batch", lambda m: True, lambda m, backend: ours(m, backend, "batch"), None),
    TimedPeer(
        "torch", lambda m: True, lambda m, backend: ours(m, None, "torch"), lacks=_again_in_torch
    ),
)
