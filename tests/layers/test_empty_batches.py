"""Layers of no sequences and of no tokens."""

import pytest

EMPTY = ((0, 3, 16), (2, 0, 16))
MECHANISMS = ("softmax", "lucid(path)", "ccq(gated_delta)", "ssd", "dplr", "softmax[causal=false]")


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_layer_of_pytorch_gives_an_empty_output_gradients_of_zero_and_the_same_cache(mechanism):
    torch = pytest.importorskip("torch")
    from precondattn.layers.torch import Attention

    layer = Attention(16, heads=2, mechanism=mechanism)
    for shape in EMPTY:
        x = torch.zeros(shape, requires_grad=True)
        y = layer(x, mask=torch.ones(shape[:2], dtype=torch.bool))
        assert y.shape == shape
        gradients = torch.autograd.grad(y.sum(), (x, *layer.parameters()))
        assert not any(gradient.any() for gradient in gradients)
        if layer.plan.mechanism.offers.causal:
            _, cache = layer(torch.ones(shape[0], 3, 16), cache=layer.init_cache(shape[0], 9))
            y, after = layer(x, cache=cache)
            assert y.shape == shape
            if shape[0]:
                torch.testing.assert_close((after.length, after.store), (cache.length, cache.store))


@pytest.mark.thorough
@pytest.mark.parametrize("mechanism", ["ccq(gated_delta)", "dplr"])
def test_a_layer_of_flax_gives_an_empty_output_and_the_same_cache(mechanism):
    nnx = pytest.importorskip("flax.nnx")
    jnp = pytest.importorskip("jax.numpy")
    from precondattn.layers.flax import Attention

    layer = Attention(16, heads=2, mechanism=mechanism, rngs=nnx.Rngs(0))
    for shape in EMPTY:
        assert layer(jnp.zeros(shape, "float32")).shape == shape
    _, cache = layer(jnp.ones((2, 3, 16), "float32"), cache=layer.init_cache(2, 9))
    _, after = layer(jnp.zeros((2, 0, 16), "float32"), cache=cache)
    assert all((after.store[name] == state).all() for name, state in cache.store.items())


def test_a_decoder_takes_empty_batches_and_no_empty_prompts():
    torch = pytest.importorskip("torch")
    from precondattn.layers.torch import Decoder

    model = Decoder(9, 16, heads=2, layers=["ccq(gated_delta)", "softmax"])
    for shape in ((0, 3), (2, 0)):
        tokens = torch.zeros(shape, dtype=torch.int64)
        assert model(tokens).shape == (*shape, 9)
        with pytest.raises(ValueError, match="without empty axes"):
            model.generate(tokens, 2)
