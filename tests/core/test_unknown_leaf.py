"""A leaf that no backend has an algorithm for runs on the reference, and `explain` says why."""

from dataclasses import dataclass
from importlib import reload
from itertools import product
from typing import ClassVar

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
from precondattn.dispatch.discovery import discover
from precondattn_jax.backend import Jax
from precondattn_portable.backend import Portable
from tests.core.inputs import asarray_of, inputs_of

LIBRARIES = ("numpy", "torch", "jax", "array_api_strict")
VERBS = ("forward", "vjp", "extend", "extend_vjp")


NAMES = {"other_softmax": pa.Softmax, "other_delta": pa.GatedDelta, "other_rows": pa.UnitRows}


@pytest.fixture(scope="module")
def leaves():
    """Subclasses with names, which may define other mathematics than their base classes."""
    made = {}
    for name, base in NAMES.items():
        members = {"name": name, "__annotations__": {"name": ClassVar[str]}}
        if name != "other_rows":
            members["scale_for"] = lambda self, d, base=base: 2 * base.scale_for(self, d)
        made[name] = dataclass(frozen=True)(type(name, (base,), members))()
    yield made
    for name in NAMES:
        registry.unregister(name)


@pytest.fixture(params=NAMES)
def leaf(request, leaves):
    return leaves[request.param]


def assert_close(result, expected):
    result = result.detach() if isinstance(result, torch.Tensor) else result
    np.testing.assert_allclose(np.asarray(result), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_verb_runs_on_the_reference(leaf, library):
    expected, pullback = leaf.vjp(**inputs_of(leaf), backend="reference")
    asarray = asarray_of({"jax": "jax.numpy"}.get(library, library))
    gradients, cotangent = pullback(np.cos(expected)), asarray(np.cos(expected))
    x, named = inputs_of(leaf, library), {"capacity": 7}
    cache = leaf.init_cache(**x, **named)
    for options in ({}, {"verb": "vjp"}, {"cache": cache}):
        assert leaf.explain(**x, **options).backends == ("reference",)
    assert_close(leaf(**x), expected)
    out, pull = leaf.vjp(**x)
    pullbacks = [pull]
    if leaf.name == "other_delta":
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


@pytest.mark.parametrize("name", ["other_delta", "other_softmax"])
def test_the_gradient_of_a_library_is_the_same(leaves, name):
    """Of other_rows the closed form takes the norm as constant, and autograd does not."""
    leaf = leaves[name]
    out, pullback = leaf.vjp(**inputs_of(leaf))
    expected = pullback(np.cos(out))
    x = inputs_of(leaf, "torch", requires_grad=True)
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
    leaf, table = leaves["other_delta"], precondattn_portable.backend.ALGORITHMS
    monkeypatch.setitem(table, type(leaf), table[pa.Softmax])
    assert Portable().algorithm_class(leaf) is not None
    reload(precondattn_jax.algorithms)
    assert Jax().algorithm_class(leaf) is None
    monkeypatch.undo()
    reload(precondattn_jax.algorithms)
