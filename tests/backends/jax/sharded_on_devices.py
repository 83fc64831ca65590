"""Calls on four devices: the collectives of their compiled text, and their results.

`test_backend.py` runs these tests, in a process that has several devices.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import precondattn as pa
from precondattn.frameworks.jax import independent_axes
from precondattn.layers.flax import Attention
from precondattn_conformance.cases import cases
from precondattn_conformance.inputs import CallLayout, make_inputs
from precondattn_conformance.runner import run_case
from tests.backends.jax.four_devices import told

__all__ = ["told"]

if jax.device_count() < 4:
    pytest.skip("needs four devices", allow_module_level=True)

COLLECTIVE = r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("


def mesh_of(*sizes, kind=AxisType.Auto):
    return jax.make_mesh(sizes, ("data", "model")[-len(sizes) :], axis_types=(kind,) * len(sizes))


HEADS = mesh_of(4)
BOTH = mesh_of(2, 2)
EXPLICIT = mesh_of(2, 2, kind=AxisType.Explicit)


def inputs_of(expression, **sizes):
    m = pa.parse(expression)
    layout = CallLayout(
        "sharded", **({"b": 4, "t": 9, "s": 9, "h": 4, "n": 4, "d": 4, "e": 4} | sizes)
    )
    return {n: jnp.asarray(a, "float32") for n, a in make_inputs(m, layout, "clustered").items()}


def placed(x, mesh, specs):
    """The inputs, each sharded by its own of the specs, or all by one."""
    return {
        n: jax.device_put(a, NamedSharding(mesh, specs[n] if isinstance(specs, dict) else specs))
        for n, a in x.items()
    }


def collectives(function, *arrays):
    text = jax.jit(function).lower(*arrays).compile().as_text()
    return sorted(re.findall(COLLECTIVE, text))


def loss(m, x, **masks):
    return jnp.sum(jnp.sin(m(**x, **masks, backend="jax")))


def check(function, x, sharded, expected=frozenset()):
    """The collectives, and the results of one device. Returns the result.

    `expected` lists the collectives; a set has their kinds.
    """
    found = collectives(function, sharded)
    assert (set(found) if not isinstance(expected, list) else found) == expected
    result = jax.jit(function)(sharded)
    for array, alone in zip(
        jax.tree.leaves(result), jax.tree.leaves(jax.jit(function)(x)), strict=True
    ):
        np.testing.assert_allclose(array, alone, rtol=1e-4, atol=1e-4)
    return result


def messages(told):
    return [str(r.message) for r in told if r.category is pa.GatheredWarning]


def test_one_key_head_is_on_every_device_and_two_are_not_divided_by_four(told):
    """The gradients of one key and value are summed over devices, and nothing else is sent.

    With two, the four query heads are gathered, and the user is warned.
    """
    m, x = pa.Lucid(), inputs_of("lucid", n=1)
    sharded = placed(x, HEADS, {"q": P(None, None, "model"), "k": P(), "v": P()})
    out = check(lambda x: m(**x), x, sharded)
    assert out.sharding.spec == P(None, None, "model")
    check(jax.grad(partial(loss, m)), x, sharded, ["all-reduce"])
    assert messages(told) == []
    m, x = pa.Softmax(), inputs_of("softmax", n=2)
    sharded = placed(x, HEADS, {"q": P(None, None, "model"), "k": P(), "v": P()})
    check(lambda x: m(**x), x, sharded, ["all-gather"])
    (message,) = messages(told)
    assert "heads" in message


@pytest.mark.parametrize("expression", ["ccq(retention)"])
def test_heads_whose_decay_depends_on_their_number_are_gathered(expression, told):
    """A device that has some heads does not know which of all they are."""
    m, x = pa.parse(expression), inputs_of(expression)
    heads = {n: P(*(None, None, "model")[: a.ndim]) for n, a in x.items()}
    out = jax.jit(lambda x: m(**x))(placed(x, HEADS, heads))
    expected = m(**x, backend="reference")
    np.testing.assert_allclose(out, expected, atol=1e-5 * float(jnp.max(jnp.abs(expected))))
    assert any("decay of a head depends on its number" in message for message in messages(told))


def test_a_sharded_time_axis_is_gathered_with_one_warning(told):
    m, x = pa.Lucid(), inputs_of("lucid", t=8, s=8)
    sharded = placed(x, HEADS, P(None, "model"))
    check(lambda x: m(**x), x, sharded, {"all-gather"})
    (message,) = messages(told)
    assert "context_parallel" in message
    check(lambda x: pa.gla(**x), inputs_of("gla"), placed(inputs_of("gla"), HEADS, P("model")))
    assert len(messages(told)) == 1


def test_an_axis_of_vmap_is_one_more_axis_to_shard():
    spec = P(None, None, None, "model")
    m, x = pa.Lucid(), inputs_of("lucid")
    x = {n: jnp.stack([a, 0.5 * a, -a, 2.0 * a]) for n, a in x.items()}
    sharded = placed(x, HEADS, spec)
    gradients = check(jax.vmap(jax.grad(partial(loss, m))), x, sharded)
    assert all(g.sharding.spec == spec for g in gradients.values())


@pytest.mark.parametrize(
    ("expression", "mask"),
    [
        ("lucid", "key_mask"),
        ("softmax", "segment_ids"),
        ("gated_delta", "lengths"),
    ],
)
def test_in_a_shard_map_a_call_is_that_of_one_device(expression, mask):
    m, x = pa.parse(expression), inputs_of(expression)
    masks = CallLayout("", b=4, t=9, s=9, mask=mask).masks() if mask else {}

    def gradient(x, masks):
        return jax.grad(lambda x: loss(m, x, **masks))(x)

    spec = P("data", None, "model")
    mapped = jax.shard_map(gradient, mesh=BOTH, in_specs=(spec, P("data")), out_specs=spec)
    given = {name: jnp.asarray(array) for name, array in masks.items()}
    sharded = (placed(x, BOTH, spec), given)
    check(lambda given: mapped(*given), (x, given), sharded)


def test_a_constraint_may_name_axes_of_the_mesh_in_use():
    """XLA then reports shardings without names."""
    m, x, spec = pa.Lucid(), inputs_of("lucid"), P("data", None, "model")

    def call(x):
        x = {n: jax.lax.with_sharding_constraint(a, spec) for n, a in x.items()}
        return m(**x)

    with jax.set_mesh(BOTH):
        np.testing.assert_allclose(jax.jit(call)(x), m(**x), rtol=1e-4, atol=1e-4)
        assert collectives(call, x) == []


@pytest.mark.parametrize("expression", ["gated_delta", "lucid"])
def test_in_explicit_mode_results_and_caches_are_sharded(expression):
    m, x = pa.parse(expression), inputs_of(expression)
    spec = P("data", None, "model")
    sharded = placed(x, EXPLICIT, spec)

    def calls(x):
        out = m(**x)
        cache = m.init_cache(**x, capacity=16)
        first, cache = m.extend(cache, **x)
        second, cache = m.extend(cache, **{n: a[:, :2] for n, a in x.items()})
        return out, first, second, cache.store, jax.grad(partial(loss, m))(x)

    out, first, second, store, gradients = check(calls, x, sharded)
    for array in (out, first, second, *gradients.values()):
        assert tuple(array.sharding.spec)[:3] == tuple(spec)
    for array in store.values():
        assert array.sharding.spec[0] == "data"


@pytest.mark.parametrize("expression", ["gated_delta"])
def test_the_inputs_decide_the_device_and_not_the_default(expression):
    m, x = pa.parse(expression), inputs_of(expression)
    x, masks = jax.device_put(x, jax.devices()[0]), {"lengths": [9, 4, 9, 1]}
    layer = Attention(8, heads=2, mechanism=expression, rngs=nnx.Rngs(0))

    def called():
        out, pullback = m.vjp(**x, **masks)
        cache = m.init_cache(**x, capacity=18)
        _, cache = m.extend(cache, **x, **masks)
        after, later = m.extend(cache.select([0]), **{n: a[:1, :1] for n, a in x.items()})
        rows = layer.init_cache(1, 4)
        return out, pullback(out), after, cache.store, later.store, rows.store

    expected = called()
    with jax.default_device(jax.devices()[1]):
        found = called()
    for array, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert array.devices() == {jax.devices()[0]}
        np.testing.assert_array_equal(array, other)


# ---- The check `sharding` of the suite ----------------------------------------------------------


def checked(expression, backend):
    """The outcome of the suite's check."""
    (case,) = cases(
        "full",
        only_libraries=("jax",),
        only_mechanisms=(expression,),
        only_checks=("sharding",),
    )
    return run_case(case, backend)


@pytest.mark.parametrize(
    ("expression", "backend"),
    [("ccq(gated_delta)", "jax"), ("lucid", "reference"), ("gla", "pallas")],
)
def test_the_check_of_the_suite_passes(expression, backend):
    outcome = checked(expression, backend)
    assert outcome.status == "passed", outcome.text


def test_the_check_finds_a_rule_without_heads(monkeypatch, told):
    jax.clear_caches()  # Compiled functions are forgotten before and after a fault is planted.
    monkeypatch.setattr(independent_axes, "INDEPENDENT", "b")
    outcome = checked("linear", "jax")
    assert outcome.status == "failed"
    assert "all-gather" in outcome.reason
    with pytest.raises(AssertionError):
        exec(outcome.snippet, {})
    monkeypatch.undo()
    jax.clear_caches()
    exec(outcome.snippet, {})  # The snippet passes.
