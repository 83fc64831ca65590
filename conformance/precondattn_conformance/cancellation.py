"""Sizes of the terms of gradients that are sums with cancellation.

The gradient of a temperature is one number for all tokens,

    dτ = −Σ_t ⟨q_t, dq_t⟩ / τ,

and its terms cancel: on clustered keys the sum is up to 20 times smaller than the terms. A kernel
that recomputes its weights for the gradient has an error of dq that is well within its bound, but
large relative to dτ. So the error of dτ is measured against its terms. The same holds for λ of a
difference, dλ = −Σ_t ⟨do_t, o₂_t⟩. The terms are the gradient of a τ or λ that is given for each
token and head. This holds wherever the leaf is in the mechanism.

The gradient of the values of a difference, dv = P₁ᵀ do − λ P₂ᵀ do, cancels where the two maps agree
and λ is near 1. Autograd rounds both parts to the dtype of v before it adds them. The gradients of
keys and gates under Mesa have such parts, of its sums and of the base: a longer key shortens the
query that reads it.

In Hedgehog's map, with φ = softmax([y, −y]), the gradient dz = φ ∘ (dφ − φ·dφ) nearly cancels where
dφ is nearly the same for all features: the more of them there are, the less they differ.

Where one key has all the weight, or is the only key, the gradients of queries and keys

    dq_i = s Σ_j P_ij (⟨do_i, v_j⟩ − ⟨do_i, o_i⟩) k_j

are nearly 0: the remainder of terms as large as s ‖do‖ ‖v‖ ‖k‖. The same holds for every other
input that only the scores depend on, such as a bias.

With a single query, the gradient of a linear layer's values is s ⟨q, k_s⟩ do, without decays and
erasures. Where q and k_s are nearly orthogonal, it is the remainder of d terms, together as large
as s ‖q‖ ‖k‖ ‖do‖ / √d.

While a state S holds a large value, the gradients of a gate and of a write's strength,

    dg_t = Σ dS ∘ S,    dβ_t = ⟨du_t, v_t − Sᵀ k_t⟩,    du_t = dSᵀ k_t,

are sums over that state: their terms are as large as ‖du‖ times a row of S, which has 1/√d of the
value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

import precondattn as pa
from precondattn.algebra.group import Group
from precondattn.algebra.leaf_protocol import LeafCall, LeafProtocol
from precondattn.algebra.program import Program
from precondattn.arrays import Array
from precondattn.execution import run
from precondattn.execution.input_names import CALL_OPTIONS
from precondattn.spec.mesa_query import MesaQuery

Sizes = float | np.ndarray
"""Sizes of terms: one number for all elements, or one for each."""

NO_MASKS = {name: None for name in CALL_OPTIONS if name != "backend"}


@dataclass(frozen=True)
class TemperedByToken(pa.Tempered):
    """The leaf q / τ, with a τ for each token and head."""

    @property
    def inputs(self) -> pa.Inputs:
        return pa.Inputs(q="b t h d", tau="b t h in (0, inf)")

    def _tau(self, x: Mapping[str, Array]) -> Array:
        return np.where(x["tau"] == 0, 1.0, x["tau"])[..., None]  # τ is 0 in padding.

    def forward(self, x: Mapping[str, Array], frame: pa.Frame) -> tuple[Array, tuple[Array, ...]]:
        return x["q"] / self._tau(x), ()

    def backward(
        self,
        x: Mapping[str, Array],
        frame: pa.Frame,
        out: Array,
        residuals: tuple[Array, ...],
        cotangent: Array,
    ) -> dict[str, Array]:
        d_tau = -np.sum(cotangent * out / self._tau(x), axis=3)
        return {"q": cotangent / self._tau(x), "tau": d_tau}


SUMMED: dict[type, str] = {pa.Tempered: "tau", pa.Difference: "lam"}
"""The input of each leaf type whose gradient is a sum over tokens."""
BY_TOKEN: dict[type, pa.Leaf] = {
    pa.Tempered: TemperedByToken(),
    pa.Difference: pa.Difference(per="token"),
}
"""The variant of each leaf type that takes this input for every token, without the sum."""


def is_summed(leaf: LeafProtocol) -> bool:
    return type(leaf) in SUMMED and leaf != BY_TOKEN[type(leaf)]


def sizes_of_terms(
    mechanism: pa.Mechanism,
    inputs: dict[str, np.ndarray],
    cotangent: np.ndarray,
    masks: dict[str, np.ndarray],
) -> dict[str, Sizes]:
    """The size of the terms of each such gradient, by input. For a sum over tokens it is the
    largest over all heads; for parts of a gradient, that of the larger part at each element."""
    calls = mechanism.program.calls
    summed = {
        dict(c.arguments)[SUMMED[type(c.leaf)]]: c.leaf
        for c in calls
        if isinstance(c.leaf, pa.Tempered | pa.Difference) and is_summed(c.leaf)
    }
    parts = {
        name: [i for i, call in enumerate(calls) if name in call.reads]
        for name in _cancelling(mechanism)
        if name in inputs
    }
    if not summed and not parts:
        return {}
    separate = [
        LeafCall(
            call.out,
            BY_TOKEN[type(call.leaf)] if is_summed(call.leaf) else call.leaf,
            tuple((a, _part(v, i) if v in parts else v) for a, v in call.arguments),
        )
        for i, call in enumerate(calls)
    ]
    separated = dict(inputs)
    for name, leaf in summed.items():
        heads = inputs["q"] if isinstance(leaf, pa.Tempered) else cotangent
        separated[name] = np.broadcast_to(inputs[name], (*cotangent.shape[:2], heads.shape[2]))
    separated |= {_part(name, i): inputs[name] for name, readers in parts.items() for i in readers}
    terms = _sizes_of_gradients(
        Program(separate, mechanism.program.out), separated, cotangent, masks
    )
    sizes: dict[str, Sizes] = {
        name: float(np.max(np.sum(terms[name], axis=(0, 1) if leaf.per == "head" else None)))
        for name, leaf in summed.items()
    }
    for name, readers in parts.items():
        sizes[name] = np.max([terms[_part(name, i)] for i in readers], axis=0)
    return sizes


def _cancelling(mechanism: pa.Mechanism) -> tuple[str, ...]:
    """The inputs whose gradients have parts that cancel, one for each call that reads them."""
    leaves = mechanism.program.leaves
    if any(isinstance(leaf, pa.Difference) for leaf in leaves):
        return ("v",)
    return ("k", "g") if any(isinstance(leaf, MesaQuery) for leaf in leaves) else ()


def _part(name: str, call: int) -> str:
    """The name of an input for one call that reads it."""
    return f"{name} of call {call}"


@dataclass(frozen=True)
class HedgehogTerms(pa.HedgehogMap):
    """Hedgehog's map, whose `backward` returns the sums of the sizes of the gradients' terms."""

    def backward(
        self,
        x: Mapping[str, Array],
        frame: pa.Frame,
        out: Array,
        residuals: tuple[Array, ...],
        cotangent: Array,
    ) -> dict[str, Array]:
        d_z = out * (np.abs(cotangent) + np.abs(np.sum(out * cotangent, axis=-1, keepdims=True)))
        first, second = np.split(d_z, 2, axis=-1)
        d_y, size = self.factor * (first + second), np.abs(x["x"])
        weight = np.abs(x["weight"])
        d_weight = np.einsum("bthi,bthj->hij", d_y, size)
        d_bias = np.sum(d_y, axis=(0, 1))
        return {
            "x": np.squeeze(d_y[..., None, :] @ weight, axis=-2),
            "weight": d_weight if self.per == "head" else np.sum(d_weight, axis=0),
            "bias": d_bias if self.per == "head" else np.sum(d_bias, axis=0),
        }


def sizes_of_feature_maps(
    mechanism: pa.Mechanism,
    inputs: dict[str, np.ndarray],
    cotangent: np.ndarray,
    masks: dict[str, np.ndarray],
) -> dict[str, float]:
    """The sizes of the terms of the gradients of all inputs of Hedgehog's map."""
    program, maps = mechanism.program, []
    calls = list(program.calls)
    for i, call in enumerate(calls):
        if type(call.leaf) is pa.HedgehogMap:
            leaf = HedgehogTerms(factor=call.leaf.factor, per=call.leaf.per)
            calls[i] = call._replace(leaf=leaf)
            maps += [value for _, value in call.arguments if value in inputs]
    if not maps:
        return {}
    terms = _sizes_of_gradients(Program(calls, program.out), inputs, cotangent, masks)
    return {name: float(np.max(terms[name])) for name in maps}


def _sizes_of_gradients(
    program: Program,
    arrays: Mapping[str, np.ndarray],
    cotangent: np.ndarray,
    masks: Mapping[str, np.ndarray],
) -> dict[str, np.ndarray]:
    """The absolute gradients of a program's inputs, by the reference."""
    group = Group(program)
    inputs = {name: arrays[name] for name in group.inputs}
    _, pullback = run.vjp(group, (), inputs, "reference", {**NO_MASKS, **masks})
    return {name: np.abs(gradient) for name, gradient in pullback(cotangent).items()}


def sizes_when_saturated(inputs: dict[str, np.ndarray], cotangent: np.ndarray) -> dict[str, float]:
    """The size of the terms of every gradient that passes through a softmax of huge logits."""

    def longest(array: np.ndarray) -> float:
        return float(np.max(np.linalg.vector_norm(array, axis=-1)))

    rows = longest(cotangent) * longest(inputs["v"])
    if "logits" in inputs:  # Logits that are given take the place of scores.
        return {"logits": rows * inputs["v"].shape[-1] ** -0.5}
    scale = inputs["k"].shape[-1] ** -0.5
    q, k = longest(inputs["q"]), longest(inputs["k"])
    sizes = {"q": scale * k, "k": scale * q, "q2": scale * k, "k2": scale * q, "tau": scale * q * k}
    return {name: rows * sizes.get(name, 1.0) for name in inputs if name != "v"}


def sizes_of_one_query(
    mechanism: pa.Mechanism, inputs: dict[str, np.ndarray], cotangent: np.ndarray
) -> dict[str, float]:
    """The size of the terms of the values' gradient in a linear layer with a single query.

    It is not known for a composition, whose layer may read other queries and keys.
    """
    leaf = mechanism.program.leaves[0]
    if not isinstance(leaf, pa.LinearFamily) or getattr(leaf, "normalize", False):
        return {}
    if len(mechanism.program.calls) > 1 or cotangent.shape[1] > 1:
        return {}
    rows = inputs["q"], leaf.keys(inputs)
    d = rows[0].shape[-1]
    lengths = (float(np.max(np.linalg.vector_norm(each, axis=-1))) for each in rows)
    size = leaf.scale_for(d) * float(np.prod([*lengths])) * d**-0.5
    return {"v": size * float(np.max(np.abs(cotangent)))}


def sizes_when_overwritten(
    inputs: dict[str, np.ndarray], gradients: dict[str, np.ndarray]
) -> dict[str, float]:
    """The size of the terms of the gradients of gates and β where a state holds a large value."""
    strength = inputs.get("beta", np.ones(1))[..., None]
    d_u = np.divide(gradients["v"], strength, where=strength > 0, out=np.zeros_like(gradients["v"]))
    lengths = (float(np.max(np.linalg.vector_norm(a, axis=-1))) for a in (inputs["v"], d_u))
    size = float(np.prod([*lengths])) * inputs["k"].shape[-1] ** -0.5
    return {name: size for name in ("g", "beta") if name in inputs}
