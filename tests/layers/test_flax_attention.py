"""`precondattn.layers.flax.Attention`: its numbers are PyTorch's, and Flax's own machinery."""

from functools import partial

import pytest

pytest.importorskip("flax")

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, serialization
from jax.sharding import PartitionSpec

import precondattn as pa
from precondattn.layers.flax import Attention, to_flax
from tests.backends.jax.four_devices import assert_pass_on_four_devices
from tests.layers.layer_cases import layer

COMPOSED = ("lucid(path)", "ccq(gated_delta)", "differential(laser)")


def from_numpy(array):
    return pytest.importorskip("torch").tensor(array)


def made(expression, rngs=None, **options):
    return layer(Attention, expression, rngs=rngs or nnx.Rngs(0), **options)


def hidden(b, t, width=24, dtype="float32", seed=1):
    return jax.random.normal(jax.random.key(seed), (b, t, width), dtype)


MASK = np.asarray([[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 1, 0]]) > 0


def both(expression):
    """A layer of PyTorch, and that of Flax with its weights."""
    torch = pytest.importorskip("torch")
    from precondattn.layers import torch as in_torch

    torch.manual_seed(0)
    attn = layer(in_torch.Attention, expression)
    same = nnx.eval_shape(lambda: made(expression))
    nnx.update(same, to_flax(attn.state_dict()))
    again = in_torch.to_torch(nnx.state(same, nnx.Param))
    assert set(again) == set(attn.state_dict())
    assert all(torch.equal(again[name], value) for name, value in attn.state_dict().items())
    return attn, same


@pytest.mark.thorough(but=("delta_product", "dplr"))
@pytest.mark.parametrize("expression", [*sorted(pa.mechanisms()), *COMPOSED])
def test_the_same_weights_give_the_numbers_of_pytorch(expression):
    attn, same = both(expression)
    x = np.asarray(hidden(2, 6))
    expected = attn(from_numpy(x), mask=from_numpy(MASK)).detach()
    y = nnx.jit(lambda attn, x, mask: attn(x, mask=mask))(same, jnp.asarray(x), MASK)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("expression", ["gated_delta", "differential"])
def test_the_same_weights_give_the_gradients_of_pytorch(expression):
    from precondattn.layers.torch import to_torch

    attn, same = both(expression)
    x, cotangent = (np.asarray(hidden(2, 5, seed=seed)) for seed in (1, 2))
    (attn(from_numpy(x)) * from_numpy(cotangent)).sum().backward()
    gradients = to_torch(
        nnx.jit(nnx.grad(lambda attn: jnp.sum(attn(jnp.asarray(x)) * cotangent)))(same)
    )
    for name, weight in attn.named_parameters():
        size = float(weight.grad.abs().max()) + 1
        error = float((gradients[name] - weight.grad).abs().max())
        assert error < 1e-5 * size, name


@pytest.mark.parametrize("expression", ["softmax", "gated_delta"])
def test_any_split_of_a_sequence_gives_the_full_call_under_jit(expression):
    attn, x = made(expression), hidden(2, 6)
    full = nnx.jit(lambda attn, x: attn(x))(attn, x)
    extend = nnx.jit(lambda attn, x, cache: attn(x, cache=cache))
    first, cache = extend(attn, x[:, :4], attn.init_cache(2, 8))
    parts = [first]
    for t in (4, 5):
        y, cache = extend(attn, x[:, t : t + 1], cache)
        parts.append(y)
    np.testing.assert_allclose(jnp.concatenate(parts, 1), full, rtol=1e-5, atol=1e-5)
    assert cache.length.tolist() == [6, 6]
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(cache))


@pytest.mark.thorough
def test_scanned_layers_have_a_depth_each_and_are_computed_again_in_the_gradient():
    def one(rngs, depth):
        return made("differential", rngs=rngs, depth=depth)

    layers = nnx.split_rngs(splits=4)(nnx.vmap(one))(nnx.Rngs(0), jnp.arange(4))
    assert layers.q_proj.kernel.shape == (4, 24, 24)
    depths = nnx.state(layers, nnx.Not(nnx.Param))
    assert [leaf.tolist() for leaf in jax.tree.leaves(depths)] == [[0, 1, 2, 3]]

    def scanned(layers, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def through(x, attn):
            return x + nnx.remat(lambda attn, x: attn(x))(attn, x)

        return jnp.sum(through(x, layers) ** 2)

    graphs = [nnx.graphdef(made("differential", depth=depth)) for depth in range(4)]

    def in_turn(layers, x):
        weights = nnx.state(layers, nnx.Param)
        for i, graph in enumerate(graphs):
            x = x + nnx.merge(graph, jax.tree.map(lambda a, i=i: a[i], weights))(x)
        return jnp.sum(x**2)

    x = hidden(1, 5)
    value, gradients = nnx.jit(nnx.value_and_grad(scanned))(layers, x)
    expected, of_layers = nnx.jit(nnx.value_and_grad(in_turn))(layers, x)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for found, wanted in zip(*map(jax.tree.leaves, (gradients, of_layers)), strict=True):
        size = float(jnp.abs(wanted).max())
        np.testing.assert_allclose(found, wanted, atol=1e-5 * size)


@pytest.mark.parametrize(
    "depth", [-1, 1.5, True, np.arange(2), jnp.arange(2), jnp.ones(()), jnp.asarray(-1)], ids=str
)
def test_a_wrong_depth_is_named(depth):
    with pytest.raises(ValueError, match="depth must be a whole number"):
        made("differential", depth=depth)


def test_axes_of_parameters_have_the_usual_names():
    attn = made("gla")
    specs = nnx.get_partition_spec(nnx.state(attn))
    expected = {
        ("q_proj", "kernel"): ("embed", "heads"),
        ("k_proj", "kernel"): ("embed", "kv_heads"),
        ("g_down_proj", "kernel"): ("embed", None),
        ("g_up_proj", "kernel"): (None, "kv_heads"),
        ("g_up_proj", "bias"): ("kv_heads",),
        ("o_proj", "kernel"): ("heads", "embed"),
    }
    for (name, weight), names in expected.items():
        assert specs[name][weight].get_value() == PartitionSpec(*names), (name, weight)


@pytest.mark.thorough
def test_a_layer_with_sharded_parameters_gives_the_same_on_four_devices():
    assert_pass_on_four_devices("../../layers/on_four_devices.py")


@pytest.mark.thorough
def test_training_on_meshes_of_four_devices_and_restarts():
    assert_pass_on_four_devices("../../layers/trained_on_four_devices.py")


def test_bfloat16_parameters():
    attn, x = made("softmax", dtype=jnp.bfloat16), hidden(2, 6, dtype="bfloat16")
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(nnx.state(attn)))
    call = nnx.jit(lambda attn, x, cache: (attn(x), attn(x, cache=cache)[0]))
    y, same = call(attn, x, attn.init_cache(2, 6))
    assert y.dtype == jnp.bfloat16
    wide = made("softmax")
    nnx.update(wide, jax.tree.map(lambda a: a.astype("float32"), nnx.state(attn)))
    expected = nnx.jit(lambda attn, x: attn(x))(wide, x.astype("float32"))
    for out in (y, same):
        error = jnp.linalg.norm(out.astype("float32") - expected)
        assert error < 0.03 * jnp.linalg.norm(expected)


def test_print_shows_mechanism_recipes_and_parameters():
    shown = str(made("retention"))
    assert shown.startswith("Attention(24, mechanism='retention')\n  q")
    assert "RoPE(W x), with theta = 10000, on 1 of the channels" in shown


def test_bad_input_is_named():
    attn, x = made("gated_delta"), hidden(2, 3)
    with pytest.raises(ValueError, match=r"x must have shape \(b, t, 24\)"):
        attn(x[..., :4])
    with pytest.raises(TypeError, match="x must be float32, as the weights; found bfloat16"):
        attn(x.astype("bfloat16"))
    with pytest.raises(TypeError, match="x must be an array of jax; found ndarray"):
        attn(np.asarray(x))
    with pytest.raises(ValueError, match="mask must have shape"):
        attn(x, mask=jnp.ones((2, 4), bool))
    with pytest.raises(ValueError, match="cache is of another layer"):
        attn(x, cache=made("gla").init_cache(2))
    with pytest.raises(ValueError, match="gla has no value heads"):
        Attention(24, heads=4, mechanism="gla", value_heads=8, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("expression", ["softmax[window=9]", "ccq(gated_delta)"])
def test_caches_that_flax_has_restored_have_arrays_of_numpy_and_are_continued(expression):
    attn = made(expression)
    step, empty = partial(attn, hidden(2, 6), mask=jnp.asarray(MASK)), attn.init_cache(2, 16)
    _, cache = step(cache=empty)
    restored = serialization.from_bytes(empty, serialization.to_bytes(cache))
    found = step(cache=restored)
    jax.tree.map(np.testing.assert_array_equal, found, step(cache=cache))
    assert all(isinstance(array, jax.Array) for array in jax.tree.leaves(found))
