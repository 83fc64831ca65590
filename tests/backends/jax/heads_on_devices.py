"""`context_parallel` of JAX on four devices: outputs, gradients and collectives.

`test_devices.py` runs these tests in a process of its own.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import precondattn as pa
from precondattn.parallel.jax import context_parallel
from precondattn_conformance.inputs import CallLayout, make_inputs

TOKENS = CallLayout("test", t=8, s=8, h=8, n=8)
MECHANISMS = {
    "softmax": TOKENS._replace(n=2),
    "softmax[bias=true]": TOKENS,
    "softmax[causal=false,distance=buckets]": TOKENS._replace(n=2),
    "lucid": TOKENS._replace(n=2),
    "laser": TOKENS._replace(n=1),
    "temperature[per=head](linear)": TOKENS,
    "gated_delta": TOKENS,
    "ccq(gla)": TOKENS,
    "mesa": TOKENS,
}


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def mesh_of(kind):
    return jax.make_mesh((4,), ("cp",), axis_types=(kind,))


def problem(expression, kind=AxisType.Auto):
    layout = MECHANISMS[expression]
    m = pa.parse(expression)
    x = {n: jnp.asarray(a) for n, a in make_inputs(m, layout, "clustered").items()}
    return m, x, context_parallel(m, mesh_of(kind), "cp")


@pytest.mark.parametrize(
    ("expression", "kind"),
    [*((expression, AxisType.Auto) for expression in MECHANISMS), ("lucid", AxisType.Explicit)],
)
def test_output_and_gradients_are_those_of_one_device(expression, kind):
    m, x, attn = problem(expression, kind)
    expected = m(**x)
    weight = jnp.linspace(-1, 1, expected.size).reshape(expected.shape)

    @jax.jit
    def value(x):
        return (attn(**x) * weight).sum(), attn(**x)

    (_, out), gradients = jax.jit(jax.value_and_grad(value, has_aux=True))(x)
    assert out.sharding.spec[1] == "cp"
    assert jnp.allclose(out, expected, rtol=1e-10, atol=1e-10)
    of_one = jax.grad(lambda x: (m(**x) * weight).sum())(x)
    for name, gradient in gradients.items():
        scale = max(1.0, float(abs(of_one[name]).max()))
        assert jnp.allclose(gradient / scale, of_one[name] / scale, atol=1e-10), name


def test_a_call_without_jit_is_sharded_over_tokens():
    m, x, attn = problem("lucid")
    out = attn(**x)
    assert out.sharding.spec[1] == "cp"
    assert jnp.allclose(out, m(**x), atol=1e-12)


@pytest.mark.parametrize("mask", ["lengths", "key_mask", "segment_ids"])
def test_masks_are_those_of_all_tokens(mask):
    m, x, attn = problem("lucid")
    masks = {n: jnp.asarray(a) for n, a in TOKENS._replace(mask=mask).masks().items()}
    assert jnp.allclose(attn(**x, **masks), m(**x, **masks), atol=1e-12)


def test_tokens_are_exchanged_for_heads_and_nothing_else():
    _, x, attn = problem("lucid")
    sharding = NamedSharding(mesh_of(AxisType.Auto), P(None, "cp"))
    x = {name: jax.device_put(a, sharding) for name, a in x.items()}
    text = jax.jit(lambda x: attn(**x)).lower(x).compile().as_text()
    assert text.count(" all-to-all(") + text.count(" all-to-all-start(") == 4  # q, k, v and out
    assert " all-gather" not in text
    assert " all-reduce" not in text


def test_in_a_users_shard_map_arrays_are_parts():
    m, x, attn = problem("lucid")
    mesh = mesh_of(AxisType.Auto)
    specs = dict.fromkeys(x, P(None, "cp"))
    mapped = jax.shard_map(
        lambda x: attn(**x), mesh=mesh, in_specs=(specs,), out_specs=P(None, "cp"), check_vma=False
    )
    assert jnp.allclose(jax.jit(mapped)(x), m(**x), atol=1e-12)


@pytest.mark.parametrize(
    ("expression", "layout", "words"),
    [
        ("lucid", TOKENS._replace(t=7, s=7), "q has 7 tokens; .* a multiple of 4 on 4 devices"),
        ("lucid", TOKENS._replace(h=6, n=6), "divide the number of heads of the output; found h=6"),
        ("lucid", TOKENS._replace(h=12, n=6), "or are a multiple; found n=6"),
        ("retention", TOKENS, "depends on its number"),
    ],
)
def test_what_can_not_be_divided_is_named(expression, layout, words):
    m = pa.parse(expression)
    x = {n: jnp.asarray(a) for n, a in make_inputs(m, layout, "random").items()}
    with pytest.raises(ValueError, match=words):
        context_parallel(m, mesh_of(AxisType.Auto), "cp", layout="heads")(**x)


@pytest.mark.parametrize(
    ("expression", "h", "layout"),
    [("lucid", 4, "heads"), ("lucid", 6, "contiguous"), ("retention", 4, "contiguous")],
)
def test_a_layout_is_chosen_by_default(expression, h, layout):
    m = pa.parse(expression)
    x = make_inputs(m, TOKENS._replace(h=h, n=h), "random")
    x = {n: jnp.asarray(a) for n, a in x.items()}
    attn = context_parallel(m, mesh_of(AxisType.Auto), "cp")
    assert attn.explain(**x).layout == layout
    assert jnp.allclose(attn(**x), m(**x), atol=1e-12)


def test_the_reasons_of_both_layouts_are_given():
    m = pa.parse("deltaformer")
    x = make_inputs(m, TOKENS._replace(h=6, n=6), "random")
    x = {n: jnp.asarray(a) for n, a in x.items()}
    with pytest.raises(ValueError, match=r"layout 'heads' .*; layout 'contiguous' has no way"):
        context_parallel(m, mesh_of(AxisType.Auto), "cp")(**x)


def test_an_axis_that_the_mesh_has_not():
    with pytest.raises(ValueError, match="axis must be one of the mesh's, 'cp'; found 'sp'"):
        context_parallel("lucid", mesh_of(AxisType.Auto), "sp")


def test_a_layout_that_is_none():
    with pytest.raises(
        ValueError, match=r"'heads', 'contiguous', 'zigzag' or 'cyclic\[block=512\]'; found 'ring'"
    ):
        context_parallel("lucid", mesh_of(AxisType.Auto), "cp", layout="ring")
