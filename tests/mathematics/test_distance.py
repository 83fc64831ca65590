"""Slopes and buckets of distances in long sequences, and beside those of other libraries.

S = s q·k − m |i − j|,  or  s q·k + table[bucket(j − i)]
"""

import numpy as np
import pytest

import precondattn as pa
from precondattn.layers.recipes.learned import alibi_slopes
from precondattn.spec.distance import entry

OPTIONS = (
    {"distance": "slopes"},
    {"distance": "buckets", "max_distance": 40},
    {"distance": "buckets", "buckets": 9, "max_distance": 20, "causal": False},
    {"distance": "slopes", "causal": False, "softcap": 2.0},
    {"distance": "buckets", "buckets": 8, "max_distance": 20, "window": 30, "sink": True},
    {"distance": "slopes", "forget": "unscaled", "bias": True},
)


def problem(options, b=2, t=140, s=150, h=6, n=3, d=4, seed=0):
    rng = np.random.default_rng(seed)
    x = {
        "q": rng.normal(size=(b, t, h, d)),
        "k": rng.normal(size=(b, s, n, d)),
        "v": rng.normal(size=(b, s, n, 3)),
    }
    if options["distance"] == "slopes":
        x["slopes"] = rng.uniform(0, 0.3, size=h)
    else:
        x["bucket_table"] = rng.normal(size=(options.get("buckets", 32), h))
    if options.get("sink"):
        x["sink"] = rng.normal(size=h)
    if options.get("bias"):
        x["bias"] = rng.normal(size=(1, h, t, s))
    if options.get("forget"):
        x["g"] = -0.1 * rng.random((b, s, h))
    return x


def called(m, x, cotangent, backend, **masks):
    """The output and the gradients, as NumPy arrays."""
    if backend == "torch":
        torch = pytest.importorskip("torch")
        tensors = {name: torch.tensor(a, requires_grad=True) for name, a in x.items()}
        given = {name: torch.tensor(a) for name, a in masks.items()}
        out = m(**tensors, **given, backend=backend)
        out.backward(torch.tensor(cotangent))
        return out.detach().numpy(), {name: a.grad.numpy() for name, a in tensors.items()}
    if backend == "jax":
        jax = pytest.importorskip("jax")
        with jax.enable_x64(True):
            arrays = {name: jax.numpy.asarray(a) for name, a in x.items()}
            given = {name: jax.numpy.asarray(a) for name, a in masks.items()}
            out, pullback = jax.vjp(lambda x: m(**x, **given, backend=backend), arrays)
            gradients = pullback(jax.numpy.asarray(cotangent))[0]
            return np.asarray(out), {name: np.asarray(a) for name, a in gradients.items()}
    out, pullback = m.vjp(**x, **masks, backend=backend)
    return out, pullback(cotangent)


MASKS = {
    "none": {},
    "lengths": {"lengths": np.asarray([150, 61])},
    "key_mask": {"key_mask": np.random.default_rng(2).random((2, 150)) > 0.3},
    "segment_ids": {"segment_ids": np.asarray([[0] * 40 + [1] * 110, [0] * 149 + [1]])},
}


@pytest.mark.parametrize(
    ("number", "mask", "backend"),
    [
        *((number, "none", backend) for number in range(6) for backend in ("portable", "torch")),
        *((1, mask, backend) for mask in MASKS for backend in ("portable", "torch")),
        # Each compiles for seconds.
        *((0, "none", "jax"), (1, "segment_ids", "jax"), (2, "none", "jax")),
    ],
)
def test_blocks_of_any_distance_give_the_results_of_the_reference(number, mask, backend):
    """`test_definitions.py` compares the reference with the formula of each pair."""
    options, masks = OPTIONS[number], MASKS[mask]
    m = pa.Softmax(**options)
    x = problem(options, t=150 if masks or options.get("forget") else 140)
    cotangent = np.random.default_rng(1).normal(size=(*x["q"].shape[:3], 3))
    out, gradients = called(m, x, cotangent, backend, **masks)
    expected, of_reference = called(m, x, cotangent, "reference", **masks)
    np.testing.assert_allclose(out, expected, atol=1e-11)
    assert gradients.keys() == of_reference.keys()
    for name, gradient in of_reference.items():
        np.testing.assert_allclose(gradients[name], gradient, atol=1e-10, err_msg=name)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("buckets", "longest"), [(32, 128), (9, 20), (20, 50), (64, 1000)])
def test_buckets_are_those_of_transformers(buckets, longest, causal):
    torch = pytest.importorskip("torch")
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    ahead = np.arange(-1100, 1100)
    expected = t5.T5Attention._relative_position_bucket(
        torch.tensor(ahead), not causal, buckets, longest
    )
    m = pa.Softmax(causal=causal, distance="buckets", buckets=buckets, max_distance=longest)
    assert np.array_equal(entry(m, ahead), expected)


def test_slopes_are_those_of_x_transformers():
    peer = pytest.importorskip("x_transformers.x_transformers")
    alibi = peer.AlibiPositionalBias(heads=6, total_heads=6)
    x = problem({"distance": "slopes"}, t=20, s=30)
    x["slopes"] = np.asarray(alibi_slopes(6))
    np.testing.assert_allclose(x["slopes"], alibi.slopes.reshape(-1), rtol=1e-7)
    bias = alibi.double()(20, 30).detach().numpy()[None]
    plain = {name: x[name] for name in ("q", "k", "v")}
    for causal in (True, False):
        expected = pa.Softmax(causal=causal, bias=True)(**plain, bias=bias)
        found = pa.Softmax(causal=causal, distance="slopes")(**x)
        np.testing.assert_allclose(found, expected, atol=1e-7)


def test_no_array_of_pairs_is_made(monkeypatch):
    """Row blocks of 64 queries are made in pieces of 64 keys."""
    from precondattn_portable import distance

    entries = []
    true = distance.toeplitz

    def counted(f, rows):
        result = true(f, rows)
        entries.append(result.size)
        return result

    monkeypatch.setattr(distance, "toeplitz", counted)
    monkeypatch.setattr(distance, "TOGETHER", 2**12)
    x = problem({"distance": "slopes"}, b=1, t=512, s=512, h=2, n=1)
    pa.Softmax(distance="slopes")(**x, backend="portable")
    assert sum(entries) > 2 * 512 * 512 // 2
    assert max(entries) == 2 * 64 * 64
