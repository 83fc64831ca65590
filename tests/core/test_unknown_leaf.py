"""A leaf that no backend has an algorithm for runs on the reference, and `explain` says why."""

from dataclasses import dataclass
from importlib import reload
from itertools import product
from typing import ClassVar

import array_api_compat
import array_api_strict
import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("torch")

import jax
import jax.numpy as jnp
import torch

import precondattn as pa
import precondattn_jax.algorithms
import precondattn_portable.backend
from precondattn.algebra import registry
from precondattn.algebra.declaration import Inputs
from precondattn.cache import Slot
from precondattn.dispatch.discovery import discover
from precondattn_jax.backend import Jax
from precondattn_portable.backend import Portable

LIBRARIES = {
    "numpy": np.asarray,
    "torch": torch.asarray,
    "jax": jnp.asarray,
    "array_api_strict": array_api_strict.asarray,
}
B, S, N, E = 2, 7, 3, 4
VERBS = ("forward", "vjp", "extend", "extend_vjp")


def third_party_leaves():
    """Leaves that a third-party package may define."""

    @dataclass(frozen=True)
    class LeakyIntegrator(pa.Stateful):
        """o_t = S_t,  S_t = e^{g_t} ∘ S_{t−1} + v_t, a decay for each channel."""

        name: ClassVar[str] = "leaky_integrator"
        inputs = Inputs(v="b s n e", g="b s n e in (-inf, 0]")
        output = "b s n e"

        def slots(self):
            return (Slot("state", "leaky_integrator.state({v}, {g})", "b n e", wide=True),)

        def run(self, state, x, frame, form=None):
            xp = array_api_compat.array_namespace(x["v"])
            outputs, s = [], state["state"]
            for t in range(x["v"].shape[1]):
                s = xp.exp(x["g"][:, t, ...]) * s + x["v"][:, t, ...]
                outputs.append(s)
            return xp.stack(outputs, axis=1), {"state": s}

        def run_vjp(self, state, x, frame, cotangent, d_state, form=None):
            xp = array_api_compat.array_namespace(x["v"])
            outputs, _ = self.run(state, x, frame)
            d_v, d_g, d = [], [], d_state["state"]
            for t in reversed(range(x["v"].shape[1])):
                decay = xp.exp(x["g"][:, t, ...])
                d = d + cotangent[:, t, ...]
                d_v.append(d)
                d_g.append(d * decay * (outputs[:, t - 1, ...] if t else state["state"]))
                d = decay * d
            gradients = {"v": xp.stack(d_v[::-1], axis=1), "g": xp.stack(d_g[::-1], axis=1)}
            return gradients, {"state": d}

    @dataclass(frozen=True)
    class RunningMean(pa.Leaf):
        """o_i = the mean of all v_j that token i may attend to."""

        name: ClassVar[str] = "running_mean"
        inputs = Inputs(v="b s n e")
        output = "b s n e"

        def slots(self):
            return (Slot("value", "{v}", "b c n e"),)

        def weights(self, v, frame):
            """(b, n, t, s)"""
            xp = array_api_compat.array_namespace(v)
            mask = xp.astype(frame.visible(causal=True), v.dtype)
            mask = mask / xp.clip(xp.sum(mask, axis=-1, keepdims=True), min=1)
            return xp.broadcast_to(mask, (v.shape[0], v.shape[2], *mask.shape[2:]))

        def product(self, weights, v):
            xp = array_api_compat.array_namespace(v)
            return xp.permute_dims(weights @ xp.permute_dims(v, (0, 2, 1, 3)), (0, 2, 1, 3))

        def forward(self, x, frame):
            return self.product(self.weights(x["v"], frame), x["v"]), ()

        def backward(self, x, frame, out, residuals, cotangent):
            xp = array_api_compat.array_namespace(cotangent)
            transposed = xp.permute_dims(self.weights(x["v"], frame), (0, 1, 3, 2))
            return {"v": self.product(transposed, cotangent)}

        def step(self, past, x, frame):
            xp = array_api_compat.array_namespace(x["v"])
            v = xp.concat([past["value"], x["v"]], axis=1)
            return self.product(self.weights(v, frame), v), {"value": pa.Append(x["v"])}

    @dataclass(frozen=True)
    class Bounded(pa.TokenWise):
        """o = v / max |v| where max |v| > 1. It reads entries on the host."""

        name: ClassVar[str] = "bounded"
        inputs = Inputs(v="b s n e")
        output = "b s n e"

        def largest(self, v):
            xp = array_api_compat.array_namespace(v)
            return max(float(xp.max(xp.abs(v))), 1.0)

        def forward(self, x, frame):
            return x["v"] / self.largest(x["v"]), ()

        def backward(self, x, frame, out, residuals, cotangent):
            return {"v": cotangent / self.largest(x["v"])}

    @dataclass(frozen=True)
    class OtherDelta(pa.GatedDelta):
        """A subclass may define other mathematics than its base class."""

        name: ClassVar[str] = "other_delta"

        def scale_for(self, d):
            return 2 * super().scale_for(d)

    @dataclass(frozen=True)
    class OtherRows(pa.UnitRows):
        """A leaf without a cache whose class is unknown to backends."""

        name: ClassVar[str] = "other_rows"

    return LeakyIntegrator(), RunningMean(), Bounded(), OtherDelta(), OtherRows()


NAMES = ("leaky_integrator", "running_mean", "bounded", "other_delta", "other_rows")


@pytest.fixture(scope="module")
def leaves():
    yield {leaf.name: leaf for leaf in third_party_leaves()}
    for name in NAMES:
        registry.unregister(name)


@pytest.fixture(params=NAMES)
def leaf(request, leaves):
    return leaves[request.param]


def inputs_of(leaf, seed=0):
    rng = np.random.default_rng(seed)
    sizes = {"b": B, "s": S, "t": S, "n": N, "h": N, "u": N, "d": E, "e": E}
    x = {name: rng.normal(size=p.shape(sizes)) for name, p in leaf.inputs.items()}
    if "k" in x:
        x["k"] /= np.linalg.norm(x["k"], axis=-1, keepdims=True)
    return (
        x
        | {name: -abs(x[name]) for name in "g" if name in x}
        | ({"beta": abs(x["beta"]) / 4} if "beta" in x else {})
    )


def numpy_of(array):
    return np.asarray(array.detach() if isinstance(array, torch.Tensor) else array)


def assert_close(result, expected):
    np.testing.assert_allclose(numpy_of(result), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_verb_runs_on_the_reference(leaf, library):
    x = inputs_of(leaf)
    mine = {name: LIBRARIES[library](array) for name, array in x.items()}
    expected, pullback = leaf.vjp(**x, backend="reference")
    gradients = pullback(np.cos(expected))

    assert leaf.explain(**mine).backends == ("reference",)
    assert leaf.explain(**mine, verb="vjp").backends == ("reference",)
    assert_close(leaf(**mine), expected)
    out, pull = leaf.vjp(**mine)
    assert_close(out, expected)
    for name, gradient in pull(LIBRARIES[library](np.cos(expected))).items():
        assert_close(gradient, gradients[name])

    if leaf.name == "bounded":
        return  # It divides by the maximum over all tokens, which a step does not have.
    first, last = (
        {name: array[:, part, ...] for name, array in mine.items()}
        for part in (slice(0, 4), slice(4, S))
    )
    cache = leaf.init_cache(**mine, capacity=S)
    assert leaf.explain(**first, cache=cache).backends == ("reference",)
    a, cache = leaf.extend(cache, **first)
    b, cache = leaf.extend(cache, **last)
    assert_close(np.concatenate([numpy_of(a), numpy_of(b)], axis=1), expected)


@pytest.mark.parametrize("name", ["leaky_integrator", "other_delta"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_the_gradient_of_a_step_runs_on_the_reference(leaves, name, library):
    leaf = leaves[name]
    x = {name: LIBRARIES[library](array) for name, array in inputs_of(leaf).items()}
    cache = leaf.init_cache(**x)
    assert leaf.explain(**x, cache=cache, verb="vjp").backends == ("reference",)
    out, _, step_pullback = leaf.extend_vjp(cache, **x)
    full, pullback = leaf.vjp(**x)
    assert_close(out, numpy_of(full))
    gradients, _ = step_pullback(out)
    for name, gradient in pullback(out).items():
        assert_close(gradients[name], numpy_of(gradient))


def test_autograd_of_torch_has_the_same_gradient(leaf):
    if leaf.name in ("bounded", "other_rows"):
        pytest.skip("their closed form takes the norm as constant, autograd does not")
    x = {name: torch.tensor(a, requires_grad=True) for name, a in inputs_of(leaf).items()}
    assert leaf.explain(**x).backends == ("reference",)
    out = leaf(**x)
    out.backward(torch.cos(out.detach()))
    _, pullback = leaf.vjp(**inputs_of(leaf))
    for name, gradient in pullback(np.cos(out.detach().numpy())).items():
        assert_close(x[name].grad, gradient)


def test_grad_of_jax_has_the_same_gradient(leaves):
    for leaf in (leaves["leaky_integrator"], leaves["running_mean"]):
        x = inputs_of(leaf)
        result = jax.jit(jax.grad(lambda x, leaf=leaf: jnp.sum(jnp.sin(leaf(**x)))))(x)
        out, pullback = leaf.vjp(**x)
        for name, gradient in pullback(np.cos(out)).items():
            assert_close(result[name], gradient)


def test_explain_gives_a_reason_for_every_other_backend(leaf):
    x = inputs_of(leaf)
    for library, asarray in LIBRARIES.items():
        mine = {name: asarray(array) for name, array in x.items()}
        plan = leaf.explain(**mine)
        reasons = {c.backend: c.support.reason for c in plan.plan.considered if not c.support.ok}
        wanted = [b for b in discover().backends if not b.only_by_name and b.name != "reference"]
        assert {b.name for b in wanted} == set(reasons)
        assert all(reasons.values())
        for backend in wanted:
            if library in backend.libraries:
                assert f"for {leaf.name}" in reasons[backend.name]


def test_every_backend_declines_it_on_every_device(leaf):
    shapes = tuple((name, array.shape) for name, array in inputs_of(leaf).items())
    for backend in discover().backends:
        if backend.name == "reference":
            continue
        for library, device, verb, dtype in product(
            backend.libraries or ("numpy",), ("cpu", "cuda", "tpu"), VERBS, ("float32", "bfloat16")
        ):
            request = pa.Request(verb, library, device, dtype, shapes, frozenset())
            reason = backend.prepare(leaf, request)
            assert isinstance(reason, str), (backend.name, request)
            assert reason


def test_jax_declines_leaves_that_are_added_to_portable(leaves, monkeypatch):
    leaf, table = leaves["leaky_integrator"], precondattn_portable.backend.ALGORITHMS
    monkeypatch.setitem(table, type(leaf), table[pa.Softmax])
    assert Portable().algorithm_class(leaf) is not None
    reload(precondattn_jax.algorithms)
    assert Jax().algorithm_class(leaf) is None
    monkeypatch.undo()
    reload(precondattn_jax.algorithms)
