"""Peers: what a user would run instead, or the base that a mechanism adds work to.

`sdpa` is the peer of every mechanism that contains softmax attention, also of LASER and PaTH, which
compute something else. A peer runs in its own array library on the same numbers, and is compared
with the oracle of what it computes; a wrong one is not timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import numpy as np

import precondattn as pa
from precondattn.arrays import Array, Arrays
from precondattn.given import Given
from precondattn_conformance import libraries
from precondattn_conformance.bench.cases import BenchCase
from precondattn_conformance.bench.computation import CacheDecoder, Computation, ours
from precondattn_conformance.libraries import Library
from precondattn_conformance.peers.everyone import peer_named
from precondattn_conformance.peers.files import MissingError
from precondattn_conformance.peers.project import Peer

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
    computes: Callable[[pa.Mechanism], pa.Mechanism] = lambda mechanism: mechanism
    """What it computes beside a mechanism, such as plain attention or a base."""


def peers_of(case: BenchCase) -> list[TimedPeer]:
    """The peers of a case: those that it names, or else all that fit."""
    mechanism, names = pa.parse(case.mechanism), [peer.name for peer in PEERS]
    for name in case.peers or ():
        if name not in names:
            raise ValueError(f"unknown peer {name!r}; known are {', '.join(names)}")
    wanted = names if case.peers is None else case.peers
    fitting = [peer for peer in PEERS if peer.name in wanted and peer.fits(mechanism)]
    return [peer for peer in fitting if case.packed or peer.name != "batch"]


def lacks(peer: TimedPeer, case: BenchCase, device: str) -> str:
    """Why a peer can not run this case on this device; empty if it can."""
    name = peer.library or case.library
    library = libraries.named(name)
    if not library.is_installed():
        return f"{name} is not installed"
    if case.dtype not in library.dtypes:
        return f"{name} is not measured in {case.dtype}"
    return peer.lacks(case, device)


def _no_decoding(case: BenchCase, device: str) -> str:
    return "has no decoding" if case.work == "decode" else ""


def _lacks_gpu_kernel(case: BenchCase, device: str) -> str:
    if device == "cpu":
        return f"is a kernel for GPUs; this runs on {device}"
    if case.dtype not in libraries.HALF:
        return f"supports half precision, not {case.dtype}"
    return _no_decoding(case, device)


# Softmax attention by PyTorch and by JAX, from (batch, time, heads, …).


def sdpa(**options: Given) -> Callable[..., Array]:
    """Softmax attention by `scaled_dot_product_attention`; causal without other options."""
    from torch.nn.functional import scaled_dot_product_attention

    options = options or {"is_causal": True}

    def attention(q: Array, k: Array, v: Array) -> Array:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        grouped = q.shape[1] != k.shape[1]
        out = scaled_dot_product_attention(q, k, v, enable_gqa=grouped, **options)
        return out.transpose(1, 2)

    return attention


def _sdpa_by(kernel: str, *, is_causal: bool) -> Callable[..., Array]:
    """`sdpa` by the kernel of this name in `torch.nn.attention.SDPBackend`, or an error."""

    def attention(q: Array, k: Array, v: Array) -> Array:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(getattr(SDPBackend, kernel)):
            return sdpa(is_causal=is_causal)(q, k, v)

    return attention


def _jax_attention_by(implementation: Given, *, is_causal: bool) -> Callable[..., Array]:
    from jax.nn import dot_product_attention

    return lambda q, k, v: dot_product_attention(
        q, k, v, is_causal=is_causal, implementation=implementation
    )


def _masked_sdpa(mechanism: pa.Mechanism, backend: str | None) -> Computation:
    """SDPA with the window as a boolean mask, which is made before the call."""
    import torch

    window = mechanism.window  # type: ignore[attr-defined]

    @cache
    def masked(tokens: int, device: object) -> Callable[..., Array]:
        i = torch.arange(tokens, device=device)
        behind = i[:, None] - i
        return sdpa(attn_mask=(behind >= 0) & (behind < window))

    def attention(q: Array, k: Array, v: Array) -> Array:
        return masked(q.shape[1], q.device)(q, k, v)

    return Computation("masked_sdpa", mechanism, attention)


class SdpaDecoder(CacheDecoder):
    """Decoding by SDPA on keys and values that are already stored, heads first."""

    def __init__(self, library: Library, dtype: str, inputs: Arrays) -> None:
        super().__init__(SOFTMAX, None, library, dtype, inputs)

    def fill(self) -> None:
        from torch.nn.functional import scaled_dot_product_attention

        self.attention = scaled_dot_product_attention
        arrays = self._part(0, self.context + 1)
        self.new = {
            name: array[:, -1:].transpose(1, 2).contiguous() for name, array in arrays.items()
        }
        self.keys, self.values = (arrays[name].transpose(1, 2).contiguous() for name in "kv")

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
        arrays = self._part(0, self.context + 1)
        rounded: Arrays = {name: self.library.numpy(array) for name, array in arrays.items()}
        return np.asarray(SOFTMAX(**rounded | {"q": rounded["q"][:, -1:]}, backend="reference"))


def naive_lucid(q: Array, k: Array, v: Array) -> Array:
    """LUCID as in its paper: dense T × T matrices and one triangular solve.

    P = exp(RN(K) RN(K)ᵀ / √d − √d) below the diagonal, 1 on it
    Y = solve_triangular(P, V)
    O = softmax(Q Kᵀ / √d + mask) Y
    """
    import torch

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5
    unit = k * torch.rsqrt(k.square().mean(-1, keepdim=True) + 1e-6)
    correlation = torch.exp(scale * unit @ unit.mT - 1 / scale).tril(-1)
    y = torch.linalg.solve_triangular(correlation, v, upper=False, unitriangular=True)
    group = q.shape[1] // k.shape[1]
    k, y = (x.repeat_interleave(group, dim=1) if group > 1 else x for x in (k, y))
    t = q.shape[2]
    is_future = torch.ones(t, t, dtype=torch.bool, device=q.device).triu(1)
    scores = (scale * q @ k.mT).masked_fill(is_future, -torch.inf)
    return (scores.softmax(-1) @ y).transpose(1, 2)


# Functions of other projects. What an adapter does to the inputs, such as to repeat shared heads,
# is in the time.


class Adapted(NamedTuple):
    """A peer of the benchmarks that is another project's."""

    name: str
    adapters: dict[str, str]
    """The adapters by the mechanism's expression in its shortest form."""
    works: tuple[str, ...] = ("forward", "forward_backward")

    def fits(self, mechanism: pa.Mechanism) -> bool:
        return self._expression(mechanism) is not None

    def _expression(self, mechanism: pa.Mechanism) -> str | None:
        """The key of `adapters` for a mechanism: its own, or another name of its recurrence with
        the same scale."""
        if str(mechanism) in self.adapters:
            return str(mechanism)

        def computed(m: pa.Mechanism) -> tuple[object, object]:
            return m.recurrence, getattr(m, "scale", None)

        same = (e for e in self.adapters if computed(pa.parse(e)) == computed(mechanism))
        return None if mechanism.recurrence is None else next(same, None)

    def adapter(self, mechanism: pa.Mechanism) -> Peer:
        """The adapter of a mechanism that fits."""
        return peer_named(self.adapters[str(self._expression(mechanism))])

    def lack(self, case: BenchCase, device: str) -> str:
        """Why it is not measured on this device; empty if it is."""
        adapter = self.adapter(case.parsed)
        try:
            adapter.project.version  # noqa: B018 - It raises the error.
        except MissingError as error:
            return str(error)
        if reason := adapter.lacks_device(device):
            return reason
        if case.work not in self.works:
            return f"is measured in {' and '.join(self.works)}, and not in {case.work}"
        if adapter.dtypes is not None and case.dtype not in adapter.dtypes:
            return f"{adapter.name} does not support {case.dtype}"
        return ""

    def computation(self, mechanism: pa.Mechanism, backend: str | None = None) -> Computation:
        """What the adapter of a mechanism computes, which may be a composition with it."""
        adapter = self.adapter(mechanism)
        computed = pa.parse(adapter.mechanism)
        if isinstance(mechanism, pa.Nystrom):  # The adapter takes any number of landmarks.
            computed = replace(mechanism, start="batch")
        return Computation(self.name, computed, adapter.function_of(computed))

    @property
    def timed(self) -> TimedPeer:
        return TimedPeer(self.name, self.fits, self.computation, lacks=self.lack)


# References of flash-linear-attention, chunked ones where there are any. Others loop over the
# tokens: the gradient of a loop would keep every state, so only forward passes are measured.
NAIVE = Adapted(
    "naive_fla",
    {
        "ssd": "fla/simple_gla_chunk",
        "kda": "fla/kda_chunk",
        "gdn2": "fla/gdn2_chunk",
        "comba": "fla/comba_chunk",
        "delta_product": "fla/delta_product_recurrent",
        "atk": "fla/atk_recurrent",
        "atk(kda)": "fla/atk_kda_recurrent",
        "mesa": "fla/mesa_exact",
        "deltaformer": "fla/deltaformer",
    },
    works=("forward",),
)
FLA = ("linear", "retention", "gla", "gsa", "delta", "gated_delta", "kda", "path")
"""Mechanisms that have a kernel there, in Triton on a GPU."""
KERNELS = Adapted("fla", {name: f"fla/kernel_{name}" for name in FLA})
OF_TRANSFORMERS = Adapted(
    "transformers",
    {"gated_delta": "transformers/gated_delta_chunk", "nystrom": "transformers/nystromformer"},
)


# The peers.


def _is_softmax_inside(m: pa.Mechanism) -> bool:
    return any(leaf.name in ("softmax", "path", "deltaformer") for leaf in m.program.leaves)


def _softmax(
    name: str,
    attention_of: Callable[..., Callable[..., Array]],
    library: str = "torch",
    lacks: Callable[[BenchCase, str], str] = lambda case, device: "",
) -> TimedPeer:
    """Softmax attention, causal where the mechanism is."""

    def computes(m: pa.Mechanism) -> pa.Mechanism:
        return SOFTMAX if m.offers.causal else pa.Softmax(causal=False)

    def make(m: pa.Mechanism, backend: str | None) -> Computation:
        decoder = SdpaDecoder if name == "sdpa" and m.offers.causal else None
        attention = attention_of(is_causal=m.offers.causal)
        return Computation(name, computes(m), attention, decoder=decoder)

    return TimedPeer(name, _is_softmax_inside, make, library, lacks, computes)


def _ours(
    name: str,
    fits: Callable[[pa.Mechanism], bool],
    computes: Callable[[pa.Mechanism], pa.Mechanism] = lambda mechanism: mechanism,
) -> TimedPeer:
    """A mechanism of ours beside another one, on the same backend."""
    return TimedPeer(
        name, fits, lambda m, backend: ours(computes(m), backend, name), None, computes=computes
    )


def _adds_to_gated_delta(m: pa.Mechanism) -> bool:
    """Whether it is a gated delta rule, with gates for each channel, another key or more steps."""
    r = m.recurrence
    if r is None or r.rule != "delta" or r.gate is None:
        return False
    return r.strength == "scalar" and r != pa.GatedDelta().recurrence


def _adds_to_kda(m: pa.Mechanism) -> bool:
    """Whether it corrects a state with gates for each channel, by more than one strength."""
    r = m.recurrence
    return r is not None and r.gate == "channel" and not r.is_diagonal and r.strength != "scalar"


PEERS = (
    _softmax("sdpa", sdpa),
    TimedPeer(
        "masked_sdpa",
        lambda m: m == pa.Softmax(window=getattr(m, "window", None) or 1),
        _masked_sdpa,
        lacks=_no_decoding,
    ),
    _softmax("flash_sdpa", partial(_sdpa_by, "FLASH_ATTENTION"), lacks=_lacks_gpu_kernel),
    _softmax("cudnn_sdpa", partial(_sdpa_by, "CUDNN_ATTENTION"), lacks=_lacks_gpu_kernel),
    _softmax("xla", partial(_jax_attention_by, "xla"), "jax", _no_decoding),
    _softmax("cudnn", partial(_jax_attention_by, "cudnn"), "jax", _lacks_gpu_kernel),
    TimedPeer(
        "naive_lucid",
        lambda m: str(m) == "lucid",
        lambda m, backend: Computation("naive_lucid", m, naive_lucid),
        lacks=_no_decoding,
    ),
    *(adapted.timed for adapted in (OF_TRANSFORMERS, KERNELS, NAIVE)),
    _ours("gated_delta", _adds_to_gated_delta, lambda m: pa.GatedDelta()),
    _ours("kda", _adds_to_kda, lambda m: pa.KDA()),
    _ours("base", lambda m: m.role == "preconditioner", lambda m: m.base),  # type: ignore[attr-defined]
    _ours("batch", lambda m: True),
    TimedPeer(
        "torch",
        lambda m: True,
        lambda m, backend: ours(m, None, "torch"),
        lacks=lambda case, device: "is the contender itself" if case.library == "torch" else "",
    ),
)
