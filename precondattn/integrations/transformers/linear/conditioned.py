"""CCQ around the gated delta layers of a model, which contracts their queries.

    λ = σ(w·q̄ + b) for each head,      o = ccq(gated_delta)(q, k, v, g, β, λ)

With w = 0 and b = log(λ₀ / (1 − λ₀)) every λ is λ₀ at first. λ₀ = 0 would be the model as it was.
The states of CCQ and of the delta rule are one row of numbers for each sequence, which a cache of
Transformers keeps in place of the delta rule's state.
"""

from __future__ import annotations

import math
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from precondattn.algebra.piece import BackendNames
from precondattn.arrays import Tree
from precondattn.cache import Cache
from precondattn.given import Given
from precondattn.integrations.transformers.checked_calls import STATES, check_calls
from precondattn.integrations.transformers.linear.computed import Forward, Functions, compute_by
from precondattn.integrations.transformers.linear.delta_rule import called_as_by_transformers
from precondattn.integrations.transformers.linear.gated_delta import CHUNKS, STEP
from precondattn.integrations.transformers.linear.layers import linear_layers
from precondattn.integrations.transformers.linear.state_padding import checked
from precondattn.preconditioners.ccq import CCQ
from precondattn.spec.contraction_gate import ContractionGate
from precondattn.spec.delta import GatedDelta

CONDITIONED = CCQ(GatedDelta())
_GATE: ContextVar[Gate] = ContextVar("contraction_gate")
"""The gate of the layer whose forward is running; functions called in it do not get the layer."""


class Gate(nn.Module):
    """The gate λ = σ(w·q̄ + b) of each head."""

    def __init__(self, heads: int, width: int, first: float, like: Tensor) -> None:
        super().__init__()
        kind: Given = {"dtype": like.dtype, "device": like.device}
        self.weight = nn.Parameter(torch.zeros(heads, width, **kind))
        self.bias = nn.Parameter(torch.full((heads,), math.log(first / (1 - first)), **kind))

    def forward(self, q: Tensor) -> Tensor:
        """The strengths λ (b, t, h) in float32, from q (b, t, h, d)."""
        gate: Tensor = ContractionGate()(q, weight=self.weight.float(), bias=self.bias.float())
        return gate


def add_ccq(model: nn.Module, contraction: float = 0.01, backend: BackendNames = None) -> nn.Module:
    """Put `ccq` around the gated delta layers of a model, with initially small changes of outputs.

    Each layer gets two more parameters, `contraction_gate.weight` (h, d) and
    `contraction_gate.bias` (h), which are trained with the others. They are in the `state_dict`: to
    load a saved model, call `add_ccq` before loading the weights.

    Parameters
    ----------
    model : PreTrainedModel
        A model with gated delta layers (Qwen3-Next, Qwen3.5, OLMo-hybrid), changed in place.
    contraction : float
        The initial λ of every token and head, in (0, 1).
    backend : str or tuple of str, optional
        As in `use_backend_for`.

    Returns
    -------
    PreTrainedModel
        The same model.

    Raises
    ------
    TypeError, ValueError
        for a model with other linear layers, and for a contraction out of range. The model is then
        unchanged.
    """
    if not isinstance(contraction, float) or not 0 < contraction < 1:
        raise ValueError(f"contraction must be between 0 and 1; found {contraction!r}")
    layers = [*linear_layers(model)]
    if any(kind != "gated_delta" for _, kind in layers):
        raise ValueError(
            f"model: ccq normalises queries, as gated delta layers do; the linear layers of "
            f"{type(model).__name__} are Mamba-2's, which do not"
        )
    for layer, _ in layers:
        own: nn.Module = layer
        if not hasattr(layer, "contraction_gate"):
            own.contraction_gate = Gate(own.num_k_heads, own.head_k_dim, contraction, own.dt_bias)
        compute_by(layer, functions, backend, _with_gate)
    check_calls(model, STATES)
    return model


def functions(backend: BackendNames) -> Functions:
    """The functions that replace Transformers' gated delta rule."""

    def compute(
        inputs: dict[str, Tensor], normalise: bool, state: Tensor | None, returns_state: bool
    ) -> tuple[Tensor, Tensor | None]:
        if not normalise:
            raise ValueError("use_qk_l2norm_in_kernel: ccq normalises queries; found False")
        gate = _GATE.get()
        # Up to 5.22, Transformers repeats queries and keys for each of their value heads.
        repeats = inputs["q"].shape[2] // gate.bias.shape[0]
        inputs |= {name: inputs[name][:, :, ::repeats] for name in ("q", "k")}
        inputs["contraction"] = gate(inputs["q"])
        masks = _masks(inputs["k"])
        if state is None and not returns_state:
            return CONDITIONED(**inputs, **masks, backend=backend), None
        cache = CONDITIONED.init_cache(**inputs)
        if state is not None:
            cache = _unpacked(state, cache)
        out, cache = CONDITIONED.extend(cache, **inputs, **masks, backend=backend)
        return out, _packed(cache) if returns_state else None

    return called_as_by_transformers(compute, (CHUNKS, STEP))


def _with_gate(forward: Forward) -> Forward:
    """The forward of a layer, with its gate set in the context."""
    forward = checked(forward)

    def gated(self: nn.Module, *args: Given, **kwargs: Given) -> Tree:
        token = _GATE.set(self.contraction_gate)
        try:
            return forward(self, *args, **kwargs)
        finally:
            _GATE.reset(token)

    return gated


def _masks(k: Tensor) -> dict[str, Tensor]:
    """The mask of padding, whose keys Transformers sets to 0: the covariance must not count it."""
    valid = (k != 0).flatten(2).any(-1)
    return {} if valid.all() else {"key_mask": valid}


def _packed(cache: Cache) -> Tensor:
    """All states of a cache as one tensor (b, numbers)."""
    return torch.cat([state.flatten(1).float() for state in cache.store.values()], 1)


def _unpacked(states: Tensor, like: Cache) -> Cache:
    """The reverse of `_packed`; `like` has the shapes."""
    sizes = [state[0].numel() for state in like.store.values()]
    parts = states.split(sizes, 1)
    store = {
        name: part.reshape(state.shape).to(state.dtype)
        for (name, state), part in zip(like.store.items(), parts, strict=True)
    }
    return Cache(like.length, store, like.kinds)
