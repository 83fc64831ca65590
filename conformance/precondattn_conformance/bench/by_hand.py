"""Calls written by hand, as a user would write them who needs only one mechanism.

They are what the `overhead_*` cases compare with; `layers_by_hand.py` is for the `layer_*` cases.
None of them checks its arguments or masks anything, and only those of `ANY_SIZE` are fit for many
tokens. Times are those of a call from Python, so they import nothing when they are called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NoReturn

import numpy as np

import precondattn as pa
from precondattn.arrays import Array, Arrays
from precondattn_conformance.bench import layers
from precondattn_conformance.bench.cases import SWIN, BenchCase
from precondattn_conformance.bench.computation import Computation, token_count
from precondattn_conformance.libraries import Library


def ccq_gla() -> Callable[..., Array]:
    """q^c = q̄ − λ Σ q̄ and o = s ((q^c e^G) (k e^{−G})ᵀ)_{j ≤ i} v, with G the sums of g."""
    import torch

    def forward(q: Array, k: Array, v: Array, g: Array, contraction: Array) -> Array:
        q, k, v, g = (x.transpose(1, 2) for x in (q, k, v, g))
        q, unit = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        count = torch.arange(1, q.shape[2] + 1, device=q.device)[:, None]
        mean = unit.cumsum(2) / count
        second = (q @ unit.mT).tril() @ unit / count
        covariance = second - mean * (mean * q).sum(-1, keepdim=True)
        q = q - contraction.transpose(1, 2)[..., None] * covariance
        decay = g.cumsum(2)
        scores = ((q * decay.exp()) @ (k * (-decay).exp()).mT).tril()
        return (q.shape[3] ** -0.5 * scores @ v).transpose(1, 2)

    return forward


def cross_covariance() -> Callable[..., Array]:
    """o = softmax(γ q̂ k̂ᵀ) v of channels (b, h, d, t), as public code has it."""
    from torch.nn.functional import normalize

    def forward(q: Array, k: Array, v: Array, logit_scale: Array) -> Array:
        q, k, v = (x.permute(0, 2, 3, 1) for x in (q, k, v))
        q, k = normalize(q, dim=-1), normalize(k, dim=-1)
        weights = (logit_scale[:, None, None] * (q @ k.mT)).softmax(-1)
        return (weights @ v).permute(0, 3, 1, 2)

    return forward


def swin() -> Callable[..., Array]:
    """Windows of 7 × 7 of a grid of 56 × 56, shifted by 3, as public code has it.

    The grid is rolled and cut, the table gathered, and −100 added to pairs of the windows that wrap
    around, by PyTorch's `scaled_dot_product_attention`.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    rows, w, shift = 56, 7, 3
    across, at = rows // w, torch.arange(w)
    row, column = (x.flatten() for x in torch.meshgrid(at, at, indexing="ij"))
    apart = [x[:, None] - x[None, :] + w - 1 for x in (row, column)]
    entry = (apart[0] * (2 * w - 1) + apart[1]).flatten()
    part = (torch.arange(rows) >= rows - w).long() + (torch.arange(rows) >= rows - shift)

    def cut(x: Array) -> Array:
        """(b, 56, 56, …) as (b windows, 49, …)."""
        x = x.reshape(-1, across, w, across, w, *x.shape[3:]).transpose(2, 3)
        return x.reshape(-1, w * w, *x.shape[5:])

    region = cut((3 * part[:, None] + part)[None])
    mask = -100.0 * (region[:, None, :] != region[:, :, None])

    def windows(x: Array) -> Array:
        """(b, t, h, d) as (b windows, h, 49, d)."""
        grid = x.reshape(x.shape[0], rows, rows, *x.shape[2:])
        return cut(grid.roll((-shift, -shift), (1, 2))).transpose(1, 2)

    def forward(q: Array, k: Array, v: Array, bias_table: Array) -> Array:
        b, t, h, e = v.shape
        bias = bias_table[entry].reshape(w * w, w * w, h).permute(2, 0, 1)
        bias = (bias + mask[:, None]).repeat(b, 1, 1, 1)
        out = scaled_dot_product_attention(windows(q), windows(k), windows(v), attn_mask=bias)
        out = out.transpose(1, 2).reshape(b, across, across, w, w, h, e).transpose(2, 3)
        out = out.reshape(b, rows, rows, h, e).roll((shift, shift), (1, 2))
        return out.reshape(b, t, h, e)

    return forward


def numpy_softmax() -> Callable[..., Array]:
    """o = softmax(s q kᵀ) v under the causal mask."""

    def forward(q: Array, k: Array, v: Array) -> Array:
        q, k, v = (np.swapaxes(x, 1, 2) for x in (q, k, v))
        scores = q.shape[3] ** -0.5 * (q @ np.swapaxes(k, 2, 3))
        scores = np.where(np.tri(q.shape[2], dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return np.swapaxes((weights / weights.sum(-1, keepdims=True)) @ v, 1, 2)

    return forward


class DecoderByHand:
    """One token after the others, whose keys and values (or state) are stored heads first."""

    def __init__(
        self, mechanism: pa.Mechanism, library: Library, dtype: str, inputs: Arrays
    ) -> None:
        self.mechanism, self.library = mechanism, library
        self.context = token_count(mechanism, inputs) - 1
        arrays = {name: library.array(array, dtype) for name, array in inputs.items()}
        self.rounded = {name: library.numpy(array) for name, array in arrays.items()}
        self.all = {name: array.transpose(1, 2).contiguous() for name, array in arrays.items()}
        self.new = {name: array[:, :, self.context :] for name, array in self.all.items()}

    def fill(self) -> None:
        """Nothing to do: what the context leaves is made by the constructor."""

    def reset(self) -> None:
        """Nothing to do: every step writes the same slot, or returns a new state."""

    def step(self) -> Array:
        raise NotImplementedError

    def oracle_step(self) -> np.ndarray:
        return np.asarray(self.mechanism(**self.rounded, backend="reference"))[:, -1:]


class GatedDeltaDecoder(DecoderByHand):
    """S = e^g S + k (β (v − e^g Sᵀ k))ᵀ and o = s Sᵀ q."""

    def __init__(
        self, mechanism: pa.Mechanism, library: Library, dtype: str, inputs: Arrays
    ) -> None:
        super().__init__(mechanism, library, dtype, inputs)
        self.state = 0.0 * self.new["k"].mT @ self.new["v"]
        for i in range(self.context):
            x = {name: array[:, :, i : i + 1] for name, array in self.all.items()}
            self.state, _ = self._after(self.state, **x)

    @staticmethod
    def _after(
        state: Array, q: Array, k: Array, v: Array, g: Array, beta: Array
    ) -> tuple[Array, Array]:
        state = state * g.exp()[..., None]
        state = state + k.mT @ (beta[..., None] * (v - k @ state))
        return state, q.shape[3] ** -0.5 * q @ state

    def step(self) -> Array:
        return self._after(self.state, **self.new)[1].transpose(1, 2)


class LucidDecoder(DecoderByHand):
    """y = v − Σ_j exp(s k̄·k̄_j − 1/s) y_j, then attention with the values y."""

    def __init__(
        self, mechanism: pa.Mechanism, library: Library, dtype: str, inputs: Arrays
    ) -> None:
        import torch
        from torch.nn.functional import scaled_dot_product_attention

        super().__init__(mechanism, library, dtype, inputs)
        self.exp, self.attention = torch.exp, scaled_dot_product_attention
        self.unit, self.y = self._unit(self.all["k"]), self.all["v"].clone()
        self.scale = self.y.shape[3] ** -0.5
        past = self.unit[:, :, : self.context]
        system = torch.exp(self.scale * past @ past.mT - 1 / self.scale)
        self.y[:, :, : self.context] = torch.linalg.solve_triangular(
            system, self.y[:, :, : self.context], upper=False, unitriangular=True
        )

    @staticmethod
    def _unit(k: Array) -> Array:
        return k * (k.square().mean(-1, keepdim=True) + 1e-6).rsqrt()

    def step(self) -> Array:
        end, new = self.context, self.new
        unit = self._unit(new["k"])
        weights = self.exp(self.scale * unit @ self.unit[:, :, :end].mT - 1 / self.scale)
        self.all["k"][:, :, end:], self.unit[:, :, end:] = new["k"], unit
        self.y[:, :, end:] = new["v"] - weights @ self.y[:, :, :end]
        return self.attention(new["q"], self.all["k"], self.y).transpose(1, 2)


FORWARD = {
    ("ccq(gla)", "torch"): ccq_gla,
    ("cross_covariance", "torch"): cross_covariance,
    ("softmax", "numpy"): numpy_softmax,
    (SWIN, "torch"): swin,
}
"""The makers of the functions, by mechanism and library."""

ANY_SIZE = ("cross_covariance", SWIN)
"""Mechanisms whose function is linear in tokens."""

DECODERS = {("gated_delta", "torch"): GatedDeltaDecoder, ("lucid", "torch"): LucidDecoder}


def is_written(mechanism: pa.Mechanism, library: str) -> bool:
    """Whether the mechanism is written by hand in this library, for some work."""
    is_layer = library == "torch" and str(mechanism) in layers.WRITTEN
    return is_layer or (str(mechanism), library) in {**FORWARD, **DECODERS}


def lack(case: BenchCase, library: str) -> str:
    """Why nothing is written for a case; empty if something is."""
    if case.work in layers.WORKS:
        return "" if case.mechanism in layers.WRITTEN else "is not written for its layer"
    if case.calls == 1 and case.mechanism not in ANY_SIZE:
        return "is for small calls"
    tables: dict[str, Mapping[tuple[str, str], object]] = {
        "forward": FORWARD,
        "forward_backward": FORWARD,
        "decode": DECODERS,
    }
    known = tables.get(case.work, {})
    return "" if (case.mechanism, library) in known else f"is not written for {case.work}"


def by_hand(mechanism: pa.Mechanism, library: str, name: str) -> Computation:
    """The computation of a mechanism in a library."""
    key = str(mechanism), library
    make, decoder = FORWARD.get(key), DECODERS.get(key)

    def missing(**inputs: Array) -> NoReturn:
        raise NotImplementedError(f"{mechanism} is not written by hand")

    return Computation(
        name,
        mechanism,
        forward=missing if make is None else make(),
        decoder=None if decoder is None else partial(decoder, mechanism),
    )
