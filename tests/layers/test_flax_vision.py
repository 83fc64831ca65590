"""Vision layers of Flax: their numbers and gradients are PyTorch's, from the same weights."""

import pytest

pytest.importorskip("flax")
pytest.importorskip("torch")

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

import precondattn as pa
from precondattn.layers import flax
from precondattn.layers import torch as in_torch


@pytest.mark.parametrize(
    ("mechanism", "pool"),
    [
        ("row_normalized(softmax[causal=false])", "token"),
        (["windowed[size=2,grid=3/4,bias=true]", "windowed[size=2,shift=1,grid=4]"], "mean"),
    ],
)
def test_a_vision_transformer_gives_the_numbers_and_gradients_of_pytorch(mechanism, pool):
    torch.manual_seed(0)
    sizes = {"heads": 4, "blocks": 2, "classes": 5, "mechanism": mechanism, "pool": pool}
    model = in_torch.VisionTransformer((6, 8), 2, 16, **sizes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    same = flax.VisionTransformer((6, 8), 2, 16, **sizes, rngs=nnx.Rngs(0))
    shapes = {name: tuple(p.shape) for name, p in model.state_dict().items()}
    own = in_torch.to_torch(nnx.state(same, nnx.Param))
    assert {name: tuple(p.shape) for name, p in own.items()} == shapes
    nnx.update(same, flax.to_flax(model.state_dict()))

    images, cotangent = torch.randn(2, 3, 6, 8), torch.randn(2, 5)
    logits = model(images)
    (logits * cotangent).sum().backward()

    def total(model, x):
        y = model(x)
        return jnp.sum(y * cotangent.numpy()), y

    run = nnx.jit(nnx.grad(total, has_aux=True))
    gradients, found = run(same, jnp.asarray(images.numpy()))
    np.testing.assert_allclose(found, logits.detach(), rtol=1e-4, atol=1e-5)
    gradients = in_torch.to_torch(gradients)
    for name, parameter in model.named_parameters():
        size = float(parameter.grad.abs().max()) + 1
        assert float((gradients[name] - parameter.grad).abs().max()) < 1e-5 * size, name


@pytest.mark.parametrize(
    "mechanism",
    [
        "softmax[causal=false]",
        "row_normalized(cross_covariance)",
        "nystrom[landmarks=3,skip=true]",
        "windowed[size=2/3,shift=1/2,grid=4/6,bias=true]",
    ],
)
def test_attention_gives_the_numbers_of_pytorch(mechanism):
    torch.manual_seed(0)
    attn = in_torch.VisionAttention(16, heads=4, mechanism=mechanism)
    same = flax.VisionAttention(16, heads=4, mechanism=mechanism, rngs=nnx.Rngs(0))
    nnx.update(same, flax.to_flax(attn.state_dict()))
    x = torch.randn(2, 24, 16)
    found = nnx.jit(lambda attn, x: attn(x))(same, jnp.asarray(x.numpy()))
    np.testing.assert_allclose(found, attn(x).detach(), rtol=1e-4, atol=1e-5)


def test_a_bidirectional_recurrence_is_that_of_plain_calls_of_both_orders(monkeypatch):
    sizes = {"heads": 2, "blocks": 1, "classes": 3, "mechanism": "bidirectional(gated_delta)"}
    model = flax.VisionTransformer(8, 2, 12, **sizes, rngs=nnx.Rngs(0))
    images, calls = jax.random.normal(jax.random.key(1), (2, 3, 8, 8), "float32"), []
    out = nnx.jit(lambda model, x: model(x))(model, images)

    def by_plain_calls(mechanism, **x):
        calls.append(str(mechanism))
        base, t = mechanism.base, x["q"].shape[1]
        x = {name: array for name, array in x.items() if name in base.inputs}
        back = jnp.flip(base(**{name: jnp.flip(a, 1) for name, a in x.items()}), 1)
        alone = jnp.broadcast_to(jnp.arange(t), (2, t))
        return base(**x) + back - base(**x, segment_ids=alone)

    monkeypatch.setattr(pa.Bidirectional, "__call__", by_plain_calls)
    again = nnx.jit(lambda model, x: model(x) + 0)(model, images)
    np.testing.assert_allclose(again, out, rtol=1e-4, atol=1e-5)
    assert calls == ["bidirectional(gated_delta)"]


def test_half_precision_stays_near():
    sizes = {"heads": 2, "blocks": 1, "classes": 5, "channels": 1}
    model = flax.VisionTransformer(4, 2, 8, **sizes, rngs=nnx.Rngs(0))
    half = flax.VisionTransformer(4, 2, 8, **sizes, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    weights = jax.tree.map(lambda w: w.astype(jnp.bfloat16), nnx.state(model, nnx.Param))
    nnx.update(half, weights)
    x = jax.random.normal(jax.random.key(0), (3, 1, 4, 4), "float32")
    run = nnx.jit(lambda model, x: model(x))
    expected, found = run(model, x), run(half, x.astype(jnp.bfloat16))
    assert found.dtype == jnp.bfloat16
    error = jnp.linalg.norm(found.astype("float32") - expected)
    assert error < 0.05 * jnp.linalg.norm(expected)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (jnp.zeros((2, 1, 4, 5)), ValueError, r"x must have shape \(b, 1, 4, 4\)"),
        (jnp.zeros((2, 1, 4, 4), "int32"), TypeError, "x must be float32, as the weights"),
    ],
)
def test_bad_images_are_named(x, error, message):
    sizes = {"heads": 2, "blocks": 1, "classes": 5, "channels": 1}
    with pytest.raises(error, match=message):
        flax.VisionTransformer(4, 2, 8, **sizes, rngs=nnx.Rngs(0))(x)
