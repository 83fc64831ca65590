"""What tools of Flax put in the place of linear maps: adapters, and quantized weights."""

import pytest

pytest.importorskip("flax")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from precondattn.layers.flax import Attention, Decoder

TOKENS = jnp.asarray(np.arange(4 * 12).reshape(4, 12) * 7 % 31)


def decoder():
    return Decoder(31, 32, heads=4, layers=["gated_delta"], rngs=nnx.Rngs(0))


def adapt(model):
    """`nnx.LoRA` around every linear map, and their number."""
    found = [
        (parent, name, child)
        for _, parent in nnx.iter_modules(model)
        for name, child in nnx.iter_children(parent)
        if type(child) is nnx.Linear
    ]
    for parent, name, linear in found:
        sizes = linear.in_features, 4, linear.out_features
        setattr(parent, name, nnx.LoRA(*sizes, base_module=linear, rngs=nnx.Rngs(1)))
    return len(found)


@pytest.mark.thorough
def test_lora_around_every_linear_map_trains_alone_and_merges():
    model = decoder()
    before = model(TOKENS)
    assert adapt(model) == 10
    np.testing.assert_allclose(model(TOKENS), before, rtol=1e-5, atol=1e-6)

    @nnx.jit
    def step(model, optimizer):
        def loss(model):
            logits = model(TOKENS[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, TOKENS[:, 1:]).mean()

        adapters = nnx.DiffState(0, nnx.LoRAParam)
        value, gradients = nnx.value_and_grad(loss, argnums=adapters)(model)
        optimizer.update(model, gradients)
        return value

    frozen = nnx.state(model, nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam)))
    frozen = jax.tree.map(jnp.copy, frozen)
    optimizer = nnx.Optimizer(model, optax.adam(3e-2), wrt=nnx.LoRAParam)
    losses = [float(step(model, optimizer)) for _ in range(25)]
    assert losses[-1] < 0.9 * losses[0]
    after = nnx.state(model, nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam)))
    assert jax.tree.all(jax.tree.map(jnp.array_equal, frozen, after))

    expected = model(TOKENS)
    y, caches = model(TOKENS[:, :8], caches=model.init_caches(4))
    last, _ = model(TOKENS[:, 8:], caches=caches)
    np.testing.assert_allclose(jnp.concatenate([y, last], 1), expected, rtol=1e-4, atol=1e-4)
    for _, parent in [*nnx.iter_modules(model)]:
        for name, child in [*nnx.iter_children(parent)]:
            if type(child) is nnx.LoRA:
                linear = child.base_module
                linear.kernel[...] += child.lora_a[...] @ child.lora_b[...]
                setattr(parent, name, linear)
    np.testing.assert_allclose(model(TOKENS), expected, rtol=1e-4, atol=1e-4)


class InInt8(nnx.Module):
    """A linear map whose weight is no array in floating point."""

    def __init__(self, linear):
        kernel = linear.kernel[...]
        self.scale = nnx.Variable(jnp.max(jnp.abs(kernel), 0) / 127)
        self.kernel = nnx.Variable(jnp.round(kernel / self.scale[...]).astype(jnp.int8))

    def __call__(self, x):
        return x @ (self.kernel[...] * self.scale[...])


def test_a_layer_takes_maps_in_int8():
    attn = Attention(32, heads=4, mechanism="lucid", rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (2, 6, 32), "float32")
    expected = attn(x)
    for of_map in attn.plan.maps:
        setattr(attn, of_map.name, InInt8(getattr(attn, of_map.name)))
    y, cache = attn(x, cache=attn.init_cache(2, 6))
    assert 1e-4 < jnp.linalg.norm(y - expected) / jnp.linalg.norm(expected) < 0.02
    assert cache.store["k"].dtype == jnp.float32


@pytest.mark.thorough
# Qwix calls what Flax has renamed.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_qwix_quantizes_and_adapts_the_linear_maps():
    qwix = pytest.importorskip("qwix")
    attn = Attention(32, heads=4, mechanism="gated_delta", rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (2, 6, 32), "float32")
    expected = attn(x)

    rule = qwix.QuantizationRule(module_path=".*_proj", weight_qtype=jnp.int8)
    small = qwix.quantize_model(attn, qwix.PtqProvider([rule]), x)
    names = [of_map.name for of_map in attn.plan.maps]
    kernels = [getattr(small, name).kernel.array.qvalue[...] for name in names]
    assert {kernel.dtype for kernel in kernels} == {jnp.dtype("int8")}
    assert 1e-4 < jnp.linalg.norm(small(x) - expected) / jnp.linalg.norm(expected) < 0.02

    of_maps = qwix.LoraProvider(module_path=".*_proj", rank=4, alpha=8)
    tuned = qwix.apply_lora_to_model(attn, of_maps, x, rngs=nnx.Rngs(1))
    np.testing.assert_allclose(tuned(x), expected, rtol=1e-5, atol=1e-6)
    adapters = nnx.DiffState(0, nnx.LoRAParam)
    gradients = nnx.grad(lambda model: jnp.sum(model(x) ** 2), argnums=adapters)(tuned)
    assert len(jax.tree.leaves(gradients)) == 2 * len(names)
