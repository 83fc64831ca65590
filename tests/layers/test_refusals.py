"""What layers refuse, in PyTorch and in Flax."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
FRAMEWORKS = ("torch", "flax")
X = np.linspace(-1, 1, 2 * 11 * 24, dtype="float32").reshape(2, 11, 24)
IDS = np.asarray([[7, 7, 7, 0, 4, 4, 4, 4, 4, 9, 9]] * 2)
PAIRS = np.random.default_rng(1).random((2, 4, 11, 11)) > 0.4
TOKENS = np.zeros((1, 2), dtype="int64")
RAGGED = torch.nested.nested_tensor([torch.tensor(X[0, :3])], layout=torch.jagged)


@functools.cache
def layers_of(framework):
    """The classes of a framework, each of which needs no `rngs`, and its function of an array."""
    if framework == "torch":
        from precondattn.layers import torch as layers

        made, array = {}, torch.as_tensor
    else:
        nnx, jnp = pytest.importorskip("flax.nnx"), pytest.importorskip("jax.numpy")
        from precondattn.layers import flax as layers

        made, array = {"rngs": nnx.Rngs(0)}, jnp.asarray

    names = ("Attention", "Block", "Decoder", "VisionTransformer")
    kinds = {name: functools.partial(getattr(layers, name), **made) for name in names}
    attention = functools.partial(kinds["Attention"], 24, heads=4)
    decoder = functools.partial(kinds["Decoder"], 50, 24, heads=4)
    return SimpleNamespace(**kinds, array=array, attention=attention, decoder=decoder)


@functools.cache
def attention(framework, mechanism="gated_delta", **options):
    return layers_of(framework).attention(mechanism=mechanism, **options)


@functools.cache
def model(framework):
    return layers_of(framework).decoder(layers=["linear", "softmax"])


def given(framework, arguments):
    to = layers_of(framework).array
    return {n: to(a) if isinstance(a, np.ndarray) else a for n, a in arguments.items()}


CALLS = [
    ({"x": X[..., :23]}, ValueError, r"x must have shape \(b, t, 24\).*found \(2, 11, 23\)"),
    ({"x": X.astype("float16")}, TypeError, "x must be float32, as the weights; found float16"),
    ({"x": X.tolist()}, TypeError, "x must be an array of .*; found list"),
    ({"mask": X[:, :4, 0] > 0}, ValueError, r"mask must have shape \(2, 11\)"),
    ({"mask": X[..., 0]}, TypeError, "mask must be a boolean array.*found float32"),
    ({"positions": np.arange(4)}, ValueError, r"positions must have shape \(11,\)"),
    ({"cache": "state"}, TypeError, "cache must be from init_cache; found str"),
    ({"segment_ids": IDS[:, :4]}, ValueError, r"segment_ids is declared \(b t\)"),
    ({"segment_ids": IDS > 0}, TypeError, "segment_ids must have an integer dtype"),
    ({"segment_ids": IDS, "cu_seqlens": (0, 11)}, ValueError, "mean the same: give one of them"),
    ({"segment_ids": IDS, "mask": IDS > 0}, ValueError, "mask can not be given with segments"),
    ({"keep": 2}, ValueError, "keep and states_every are for a call with a cache"),
    ({"attn_mask": PAIRS}, ValueError, "takes no attn_mask: gated_delta sums up all tokens"),
    ({"prefix": np.asarray([3, 5])}, ValueError, "takes no prefix: gated_delta sums up all tok"),
]
OF_TORCH = [
    (
        {"x": RAGGED},
        (TypeError, ValueError),
        r"use torch.nested.to_padded_tensor\(x, 0.0\), and gi",
    ),
    ({"segment_ids": IDS % 2}, ValueError, "segment_ids must be contiguous"),
    ({"x": X[:1], "cu_seqlens": (0, 14)}, ValueError, "must end at s = 11 or before; found 14"),
]
OF_PAIRS = [
    ({"attn_mask": PAIRS[..., :5]}, ValueError, r"\(2 or 1, 4 or 1, 11, 11\); found"),
    ({"attn_mask": PAIRS + 0.0}, TypeError, "attn_mask must have dtype bool; found float64"),
    ({"prefix": [1, 2, 3]}, ValueError, r"prefix is declared \(b\), that is \(2,\)"),
]
ROWS = [
    *((framework, "gated_delta", *row) for framework in FRAMEWORKS for row in CALLS),
    *(("torch", "gated_delta", *row) for row in OF_TORCH),
    *(("torch", "softmax", *row) for row in OF_PAIRS),
    *(("torch", "softmax", {**row[0], "mask": X[..., 0] < 9}, *row[1:]) for row in OF_PAIRS),
]


@pytest.mark.parametrize(("framework", "mechanism", "arguments", "error", "message"), ROWS)
def test_a_bad_argument_is_named_before_any_work(framework, mechanism, arguments, error, message):
    with pytest.raises(error, match=message):
        attention(framework, mechanism)(**given(framework, {"x": X, **arguments}))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_cache_of_another_layer_is_refused(framework):
    attn, softmax = attention(framework), attention(framework, "softmax")
    x, ids, pairs = (layers_of(framework).array(a) for a in (X, IDS, PAIRS))
    mask = ids > -1
    for call, error, message in (
        (lambda: attn(x, cache=attention(framework, "gla").init_cache(2)), ValueError, "another l"),
        (lambda: attn(x, cache=attn.init_cache(3)), ValueError, "has 3 sequences, and x has 2"),
        (
            lambda: attn(x, cache=attention(framework, head_dim=8).init_cache(2)),
            ValueError,
            "'convolution of q' must have shape",
        ),
        (lambda: attn.init_cache(-1), ValueError, "batch must be"),
        (lambda: softmax.init_cache(2), TypeError, "missing capacity"),
        (lambda: softmax(x, cache=softmax.init_cache(2, 2)), ValueError, "capacity exceeded"),
        (
            lambda: attn(x, segment_ids=ids, cache=attn.init_cache(2)),
            ValueError,
            "cache can not be given with segments",
        ),
        (
            lambda: softmax(x, mask=mask, attn_mask=pairs, cache=softmax.init_cache(2, 11)),
            ValueError,
            "attn_mask can not be given with mask and a cache",
        ),
    ):
        with pytest.raises(error, match=message):
            call()


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("depth", [-1, True, np.arange(2), np.ones(()), np.asarray(-1)])
def test_a_wrong_depth_is_named(framework, depth):
    with pytest.raises(ValueError, match="depth must be a whole number"):
        layers_of(framework).attention(
            mechanism="differential", **given(framework, {"depth": depth})
        )


MODELS = [
    (lambda f: f.decoder(), TypeError, "missing 1 required keyword-only argument: 'layers'"),
    (lambda f: f.decoder(layers=2), TypeError, r"need one; write Decoder\(..., layers=2, mech"),
    (
        lambda f: f.decoder(layers=["gla"], mechanism="lucid"),
        TypeError,
        "mechanism goes with a number of layers",
    ),
    (lambda f: f.decoder(layers="lucid"), TypeError, "or a number, with mechanism='lucid'"),
    (
        lambda f: f.decoder(layers=["gla"], dropout=0.1),
        TypeError,
        "Decoder: unknown keyword 'dropout' .*no mechanism drops",
    ),
    (
        lambda f: f.decoder(layers=[{"mechanism": "gla", "attn_drop": 0.1}]),
        TypeError,
        "Attention: unknown keyword 'attn_drop' .no mech",
    ),
    (lambda f: f.decoder(layers=["gla"], hiden=8), TypeError, "'hiden' .did you mean 'hidden"),
    (lambda f: f.Decoder(0, 24, heads=2, layers=["gla"]), ValueError, "vocabulary must be"),
    (lambda f: f.Block(24, heads=2, hidden=0), ValueError, "hidden must be a whole number"),
    (lambda f: f.Block(24, heads=2, mlp="relu"), ValueError, "mlp must be 'gated' or 'plain'"),
    (
        lambda f: f.attention(mechanism="softmax[bias=true]"),
        TypeError,
        "has none for bias",
    ),
]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("call", "error", "message"), MODELS)
def test_a_model_that_can_not_be_is_named(framework, call, error, message):
    with pytest.raises(error, match=message):
        call(layers_of(framework))


DECODERS = [
    (lambda m, t: m(t * 1.0), TypeError, "tokens must be integers of .*; found float"),
    (lambda m, t: m(t[0]), ValueError, r"tokens must have shape \(b, t\); found \(2,\)"),
    (lambda m, t: m(t, mask=t[:, :1] > 0), ValueError, r"mask must have shape \(1, 2\)"),
    (lambda m, t: m.generate(t, 0), ValueError, "count must be a whole number"),
    (lambda m, t: m.generate(t, 1, temperature=-1), ValueError, "temperature must be 0 or"),
    (lambda m, t: m.generate(t, 1, top_p=0), ValueError, r"top_p must be in \(0, 1\]"),
    (lambda m, t: m.generate(t, 1, stop=50), ValueError, "stop must be a token, 0 to 49"),
    (lambda m, t: m.generate(t + 50, 1), ValueError, "between 0 and 49; found 50 to 50"),
    (lambda m, t: m.generate(t, 1, mask=t > 0), ValueError, "needs a valid token"),
    (lambda m, t: m.generate(t[:0], 2), ValueError, "without empty axes"),
    (
        lambda m, t: m(t, caches=()),
        ValueError,
        "from init_caches, one for each of 2 blocks; found 0",
    ),
    (lambda m, t: m(t, caches=[0, 0]), TypeError, "caches must be from init_caches"),
    (lambda m, t: m(t, keep=2), ValueError, "keep and states_every are for a call with a cache"),
]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("call", "error", "message"), DECODERS)
def test_a_call_of_a_decoder_that_can_not_be_is_named(framework, call, error, message):
    with pytest.raises(error, match=message):
        call(model(framework), layers_of(framework).array(TOKENS))
