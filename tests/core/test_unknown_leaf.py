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
from precondattn_conformance.inputs import CallLayout, make_inputs
from precondattn_jax.backend import Jax
from precondattn_portable.backend import Portable

LIBRARIES = {
    "numpy": np.asarray,
    "torch": torch.asarray,
    "jax": jnp.asarray,
    "array_api_strict": array_api_strict.asarray,
}
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
    class OtherDelta(pa.GatedDelta):
        """A subclass may define other mathematics than its base class."""

        name: ClassVar[str] = "other_delta"

        def scale_for(self, d):
            return 2 * super().scale_for(d)

    @dataclass(frozen=True)
    class OtherRows(pa.UnitRows):
        """A leaf without a cache whose class is unknown to backends."""

        name: ClassVar[str] = "other_rows"

    return LeakyIntegrator(), RunningMean(), OtherDelta(), OtherRows()


NAMES = ("leaky_integrator", "running_mean", "other_delta", "other_rows")


@pytest.fixture(scope="module")
def leaves():
    yield {leaf.name: leaf for leaf in third_party_leaves()}
    for name in NAMES:
        registry.unregister(name)


@pytest.fixture(params=NAMES)
def leaf(request, leaves):
    return leaves[request.param]


def inputs_of(leaf, library="numpy"):
    x = make_inputs(leaf, CallLayout("test", b=2, t=7, s=7), "clustered")
    return {name: LIBRARIES[library](array) for name, array in x.items()}


def assert_close(result, expected):
    result = result.detach() if isinstance(result, torch.Tensor) else result
    np.testing.assert_allclose(np.asarray(result), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_verb_runs_on_the_reference(leaf, library):
    expected, pullback = leaf.vjp(**inputs_of(leaf), backend="reference")
    gradients, cotangent = pullback(np.cos(expected)), LIBRARIES[library](np.cos(expected))
    x, named = inputs_of(leaf, library), {"capacity": 7}
    cache = leaf.init_cache(**x, **named)
    for options in ({}, {"verb": "vjp"}, {"cache": cache}):
        assert leaf.explain(**x, **options).backends == ("reference",)
    assert_close(leaf(**x), expected)
    out, pull = leaf.vjp(**x)
    pullbacks = [pull]
    if leaf.name in ("leaky_integrator", "other_delta"):
        assert leaf.explain(**x, cache=cache, verb="vjp").backends == ("reference",)
        _, _, step_pullback = leaf.extend_vjp(cache, **x)
        pullbacks.append(lambda d: step_pullback(d)[0])
    for pull in pullbacks:
        for name, gradient in pull(cotangent).items():
            assert_close(gradient, gradients[name])
    for part in (slice(0, 4), slice(4, 7)):
        some = {name: array[:, part, ...] for name, array in x.items()}
        out, cache = leaf.extend(cache, **some)
        assert_close(out, expected[:, part])


@pytest.mark.parametrize("name", ["leaky_integrator", "running_mean", "other_delta"])
def test_the_gradient_of_a_library_is_the_same(leaves, name):
    """Of other_rows the closed form takes the norm as constant, and autograd does not."""
    leaf = leaves[name]
    out, pullback = leaf.vjp(**inputs_of(leaf))
    expected = pullback(np.cos(out))
    x = {name: a.requires_grad_() for name, a in inputs_of(leaf, "torch").items()}
    torch.sin(leaf(**x)).sum().backward()
    of_jax = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(leaf(**x)))))(inputs_of(leaf))
    for name, gradient in expected.items():
        assert_close(x[name].grad, gradient)
        assert_close(of_jax[name], gradient)


def test_every_other_backend_declines_it_with_a_reason_on_every_device(leaf):
    others = [b for b in discover().backends if b.name != "reference"]
    for library in LIBRARIES:
        plan = leaf.explain(**inputs_of(leaf, library)).plan
        reasons = {c.backend: c.support.reason for c in plan.considered if not c.support.ok}
        assert {b.name for b in others if not b.only_by_name} == set(reasons)
        assert all(reasons.values())
        for backend in others:
            if backend.name in reasons and library in backend.libraries:
                assert f"for {leaf.name}" in reasons[backend.name]
    shapes = tuple((name, array.shape) for name, array in inputs_of(leaf).items())
    for backend in others:
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
