"""Layers of Flax: their numbers and gradients are PyTorch's, and Flax's own machinery."""

import pytest

pytest.importorskip("flax")
pytest.importorskip("torch")

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx, serialization
from jax.sharding import PartitionSpec

from precondattn.layers import flax
from precondattn.layers import torch as in_torch
from tests.backends.jax.four_devices import assert_pass_on_four_devices
from tests.layers.layer_cases import covering, layer

MASK = np.asarray([[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 1, 0]]) > 0
call = nnx.jit(lambda model, x, mask=None: model(x) if mask is None else model(x, mask=mask))


def made(expression, rngs=None, **options):
    return layer(flax.Attention, expression, rngs=rngs or nnx.Rngs(0), **options)


def hidden(b, t, width=24, dtype="float32", seed=1):
    return jax.random.normal(jax.random.key(seed), (b, t, width), dtype)


def same_weights(model, same):
    """A model of PyTorch with other weights than its first ones, and that of Flax with them."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    nnx.update(same, flax.to_flax(model.state_dict()))
    again, expected = in_torch.to_torch(nnx.state(same, nnx.Param)), model.state_dict()
    assert set(again) == set(expected)
    assert all(torch.equal(again[name], value) for name, value in expected.items())
    return model, same


def assert_close(found, expected, tolerance=1e-5):
    np.testing.assert_allclose(found, expected.detach(), rtol=tolerance, atol=1e-5)


def assert_gradients_are_those_of_pytorch(model, same, x):
    y = model(x)
    cotangent = torch.randn_like(y)
    (y * cotangent).sum().backward()

    def total(model, x):
        y = model(x)
        return jnp.sum(y * cotangent.numpy()), y

    gradients, found = nnx.jit(nnx.grad(total, has_aux=True))(same, jnp.asarray(x))
    assert_close(found, y, 1e-4)
    gradients = in_torch.to_torch(gradients)
    for name, weight in model.named_parameters():
        size = float(weight.grad.abs().max()) + 1
        assert float((gradients[name] - weight.grad).abs().max()) < 1e-5 * size, name


@pytest.mark.thorough(but=("delta_product", "dplr"))
@pytest.mark.parametrize("expression", covering("delta_product", "dplr", "lucid(path)"))
def test_the_same_weights_give_the_numbers_of_pytorch(expression):
    pair = layer(in_torch.Attention, expression), nnx.eval_shape(lambda: made(expression))
    attn, same = same_weights(*pair)
    x = hidden(2, 6)
    expected = attn(torch.tensor(x.tolist()), mask=torch.tensor(MASK))
    assert_close(call(same, x, MASK), expected)


@pytest.mark.parametrize("expression", ["gated_delta", "differential"])
def test_the_same_weights_give_the_gradients_of_pytorch(expression):
    pair = same_weights(layer(in_torch.Attention, expression), made(expression))
    assert_gradients_are_those_of_pytorch(*pair, torch.randn(2, 5, 24))


@pytest.mark.thorough(but=("row_normalized(softmax[causal=false])-token",))
@pytest.mark.parametrize(
    ("mechanism", "pool"),
    [
        ("row_normalized(softmax[causal=false])", "token"),
        (["windowed[size=2,grid=3/4,bias=true]", "windowed[size=2,shift=1,grid=4]"], "mean"),
    ],
)
def test_a_vision_transformer_gives_the_numbers_and_gradients_of_pytorch(mechanism, pool):
    sizes = {"heads": 4, "blocks": 2, "classes": 5, "mechanism": mechanism, "pool": pool}
    model, same = same_weights(
        in_torch.VisionTransformer((6, 8), 2, 16, **sizes),
        flax.VisionTransformer((6, 8), 2, 16, **sizes, rngs=nnx.Rngs(0)),
    )
    assert_gradients_are_those_of_pytorch(model, same, torch.randn(2, 3, 6, 8))


@pytest.mark.parametrize(
    "mechanism",
    [
        "row_normalized(cross_covariance)",
        "nystrom[landmarks=3,skip=true]",
        "windowed[size=2/3,shift=1/2,grid=4/6,bias=true]",
    ],
)
def test_vision_attention_gives_the_numbers_of_pytorch(mechanism):
    sizes = {"heads": 4, "mechanism": mechanism}
    attn, same = same_weights(
        in_torch.VisionAttention(16, **sizes),
        flax.VisionAttention(16, **sizes, rngs=nnx.Rngs(0)),
    )
    x = torch.randn(2, 24, 16)
    assert_close(call(same, jnp.asarray(x)), attn(x), 1e-4)


@pytest.mark.thorough(but=("ccq(gated_delta)-1",))
@pytest.mark.parametrize(
    ("expression", "keep"), [("softmax[window=9]", 0), ("ccq(gated_delta)", 1)]
)
def test_any_split_gives_the_full_call_under_jit_also_from_a_file_or_after_a_crop(expression, keep):
    attn, x = made(expression), hidden(2, 6)
    full = call(attn, x)
    extend = nnx.jit(lambda attn, x, cache: attn(x, cache=cache, keep=keep))
    empty = attn.init_cache(2, 16)
    first, cache = extend(attn, x[:, :4], empty)
    restored = serialization.from_bytes(empty, serialization.to_bytes(cache))  # Arrays of NumPy.
    parts = [first]
    for t in (4, 5):
        y, cache = extend(attn, x[:, t : t + 1], restored)
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(cache))
        parts.append(y)
        restored = cache
    np.testing.assert_allclose(jnp.concatenate(parts, 1), full, rtol=1e-5, atol=1e-5)
    assert cache.length.tolist() == [6, 6]
    if keep:
        last, _ = extend(attn, x[:, 5:], cache.crop(5))
        np.testing.assert_allclose(last, full[:, 5:], rtol=1e-5, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("mechanism", ["dplr"])
def test_a_layer_gives_an_empty_output_and_the_same_cache(mechanism):
    attn = made(mechanism)
    for shape in ((0, 3, 24), (2, 0, 24)):
        assert attn(jnp.zeros(shape, "float32")).shape == shape
    _, cache = attn(hidden(2, 3), cache=attn.init_cache(2, 9))
    _, after = attn(hidden(2, 0), cache=cache)
    assert all((after.store[name] == state).all() for name, state in cache.store.items())


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


def test_axes_of_parameters_have_the_usual_names():
    specs = nnx.get_partition_spec(nnx.state(made("gla")))
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
def test_layers_on_meshes_of_four_devices_compute_train_and_restart():
    assert_pass_on_four_devices("../../layers/on_four_devices.py")


def differs(found, expected):
    return jnp.linalg.norm(found.astype("float32") - expected) / jnp.linalg.norm(expected)


@pytest.mark.thorough(but=("False",))
@pytest.mark.parametrize("is_vision", [False, True])
def test_half_precision_stays_near(is_vision):
    def model(dtype):
        if not is_vision:
            return made("softmax", dtype=dtype)
        sizes = {"heads": 2, "blocks": 1, "classes": 5, "channels": 1, "dtype": dtype}
        return flax.VisionTransformer(4, 2, 8, **sizes, rngs=nnx.Rngs(0))

    wide, half = model(jnp.float32), model(jnp.bfloat16)
    weights = jax.tree.map(lambda w: w.astype(jnp.bfloat16), nnx.state(wide, nnx.Param))
    nnx.update(half, weights)
    nnx.update(wide, jax.tree.map(lambda w: w.astype(jnp.float32), weights))
    x = jax.random.normal(jax.random.key(0), (3, 1, 4, 4) if is_vision else (2, 6, 24), "float32")
    expected, outs = call(wide, x), [call(half, x.astype(jnp.bfloat16))]
    if not is_vision:
        step = nnx.jit(lambda attn, x, cache: attn(x, cache=cache)[0])
        outs.append(step(half, x.astype(jnp.bfloat16), half.init_cache(2, 6)))
    for found in outs:
        assert found.dtype == jnp.bfloat16
        assert differs(found, expected) < (0.05 if is_vision else 0.03)


def test_an_image_of_another_dtype_is_refused():
    sizes = {"heads": 2, "blocks": 1, "classes": 5, "channels": 1}
    model = flax.VisionTransformer(4, 2, 8, **sizes, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="x must be float32, as the weights"):
        model(jnp.zeros((2, 1, 4, 4), "int32"))


class InInt8(nnx.Module):
    """A linear map whose weight is no array in floating point."""

    def __init__(self, linear):
        kernel = linear.kernel[...]
        self.scale = nnx.Variable(jnp.max(jnp.abs(kernel), 0) / 127)
        self.kernel = nnx.Variable(jnp.round(kernel / self.scale[...]).astype(jnp.int8))

    def __call__(self, x):
        return x @ (self.kernel[...] * self.scale[...])


def test_a_layer_takes_maps_in_int8():
    attn, x = made("softmax"), hidden(2, 6)
    expected = call(attn, x)
    for of_map in attn.plan.maps:
        setattr(attn, of_map.name, InInt8(getattr(attn, of_map.name)))
    y, cache = nnx.jit(lambda attn, x, cache: attn(x, cache=cache))(attn, x, attn.init_cache(2, 6))
    assert 1e-4 < differs(y, expected) < 0.02
    assert cache.store["k"].dtype == jnp.float32
