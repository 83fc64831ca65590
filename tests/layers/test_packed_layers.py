"""Packed sequences in layers: each segment gives what it gives alone."""

import pytest

pytest.importorskip("torch")

import torch

from precondattn.layers.recipes import Convolution, Rotary
from precondattn.layers.torch import Attention, Decoder
from tests.layers.layer_cases import MECHANISMS, layer
from tests.layers.torch_layers import made

COUNTS = (3, 1, 5, 2)
BOUNDS = (0, 3, 4, 9, 11)
QUICK = [{"mechanism": "linear", "recipes": {"q": Rotary(), "k": Convolution()}}]
"""Layers with positions and a convolution that are quick to compile."""
IDS = torch.tensor([7, 7, 7, 0, 4, 4, 4, 4, 4, 9, 9])[None]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def alone(attn, x):
    return torch.cat([attn(part) for part in x.split(COUNTS, 1)], 1)


@pytest.mark.parametrize("expression", MECHANISMS)
def test_each_segment_gives_what_it_gives_alone(expression):
    attn, x = made(expression), torch.randn(1, 11, 24, dtype=torch.float64)
    expected, cotangent = alone(attn, x), torch.randn(1, 11, 24, dtype=torch.float64)
    parameters = list(attn.parameters())
    gradients = torch.autograd.grad(expected, parameters, cotangent)
    for segments in ({"segment_ids": IDS}, {"cu_seqlens": BOUNDS}):
        y = attn(x, **segments)
        torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9)
        of_packed = torch.autograd.grad(y, parameters, cotangent)
        torch.testing.assert_close(of_packed, gradients, rtol=1e-8, atol=1e-8)


def test_each_row_of_a_batch_has_segments_of_its_own():
    attn, x = made("gated_delta"), torch.randn(2, 11, 24, dtype=torch.float64)
    y = attn(x, segment_ids=torch.cat([IDS, torch.zeros_like(IDS)]))
    torch.testing.assert_close(y[:1], alone(attn, x[:1]), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(y[1:], attn(x[1:]), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("expression", ["softmax", "lucid", "gated_delta", "ssd", "gla"])
def test_tokens_after_the_last_sequence_are_padding(expression):
    attn, x = made(expression), torch.randn(1, 14, 24, dtype=torch.float64)
    expected, parameters = alone(attn, x[:, :11]), list(attn.parameters())
    gradients = torch.autograd.grad(expected.sum(), parameters)
    x[:, 11:] = torch.nan
    x.requires_grad_()
    bounds = torch.tensor(COUNTS).cumsum(0)  # int64
    y = attn(x, cu_seqlens=torch.nn.functional.pad(bounds, (1, 0)))
    torch.testing.assert_close(y[:, :11], expected, rtol=1e-9, atol=1e-9)
    assert not y[:, 11:].any()
    d_x, *of_packed = torch.autograd.grad(y.sum(), [x, *parameters])
    torch.testing.assert_close(of_packed, gradients, rtol=1e-8, atol=1e-8)
    assert d_x[:, :11].isfinite().all()
    assert not d_x[:, 11:].any()


@pytest.mark.parametrize("expression", ["softmax", "gated_delta"])
def test_nan_in_a_segment_stays_in_it(expression):
    attn, x = made(expression), torch.randn(1, 11, 24, dtype=torch.float64)
    expected = alone(attn, x)
    x[:, 4:9] = torch.nan
    y = attn(x, segment_ids=IDS)
    for kept in (slice(0, 4), slice(9, 11)):
        torch.testing.assert_close(y[:, kept], expected[:, kept], rtol=1e-9, atol=1e-9)


def test_a_decoder_of_packed_tokens_gives_the_logits_of_each_sequence_and_is_compiled():
    torch._dynamo.reset()
    model, tokens = Decoder(50, 24, heads=4, layers=QUICK), torch.randint(50, (1, 11))
    expected = torch.cat([model(part) for part in tokens.split(COUNTS, 1)], 1)
    torch.testing.assert_close(model(tokens, cu_seqlens=BOUNDS), expected, rtol=1e-4, atol=1e-5)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens, segment_ids=IDS), expected, rtol=1e-4, atol=1e-5)


def test_segments_in_flax_give_the_numbers_of_pytorch():
    nnx = pytest.importorskip("flax.nnx")
    import jax.numpy as jnp
    import numpy as np

    from precondattn.layers import flax as in_flax

    model, tokens = Decoder(50, 24, heads=4, layers=QUICK), torch.randint(50, (1, 11))
    same = in_flax.Decoder(50, 24, heads=4, layers=QUICK, rngs=nnx.Rngs(0))
    nnx.update(same, in_flax.to_flax(model.state_dict()))
    expected = model(tokens, segment_ids=IDS).detach().numpy()
    call = nnx.jit(lambda m, tokens, ids: m(tokens, segment_ids=ids))
    logits = call(same, jnp.asarray(tokens), jnp.asarray(IDS))
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)


X = torch.zeros(1, 11, 24)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"segment_ids": IDS[:, :4]}, ValueError, r"segment_ids is declared \(b t\)"),
        ({"segment_ids": IDS > 0}, TypeError, "segment_ids must have an integer dtype"),
        ({"segment_ids": IDS.flip(0) % 2}, ValueError, "segment_ids must be contiguous"),
        ({"cu_seqlens": (0, 14)}, ValueError, "cu_seqlens must end at s = 11 or before; found 14"),
        ({"segment_ids": IDS, "cu_seqlens": BOUNDS}, ValueError, "mean the same"),
        ({"segment_ids": IDS, "mask": IDS > 0}, ValueError, "mask can not be given with segments"),
    ],
)
def test_bad_segments_are_named_before_any_work(arguments, error, message):
    attn = layer(Attention, "gated_delta")
    with pytest.raises(error, match=message):
        attn(X, **arguments)


def test_segments_do_not_go_with_a_cache():
    attn = layer(Attention, "gated_delta")
    with pytest.raises(ValueError, match="cache can not be given with segments"):
        attn(X, segment_ids=IDS, cache=attn.init_cache(1))
