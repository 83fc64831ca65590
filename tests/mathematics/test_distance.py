"""Slopes and buckets of distances against a bias of pairs, in every backend, mask and cache.

S = s q·k − m |i − j|,  or  s q·k + table[bucket(j − i)], with T5's bucket as its paper defines it
"""

from math import floor, log

import numpy as np
import pytest

import precondattn as pa
from precondattn.layers.recipes.distances import alibi_slopes
from precondattn.spec.distance import entry

OPTIONS = (
    {"distance": "slopes"},
    {"distance": "buckets", "max_distance": 40},
    {"distance": "buckets", "buckets": 9, "max_distance": 20, "causal": False},
    {"distance": "slopes", "causal": False, "softcap": 2.0},
    {"distance": "buckets", "buckets": 8, "max_distance": 20, "window": 30, "sink": True},
    {"distance": "slopes", "forget": "unscaled", "bias": True},
)
BACKENDS = ("reference", "portable", "torch")


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


def bucket(ahead, rows, longest, *, causal):
    """T5's bucket of one pair, by its formula."""
    count = rows if causal else rows // 2
    n = max(-ahead, 0) if causal else abs(ahead)
    first = count if not causal and ahead > 0 else 0
    exact = count // 2
    if n < exact:
        return first + n
    share = log(n / exact) / log(longest / exact)
    return first + min(exact + floor(share * (count - exact) + 1e-9), count - 1)


def pairs_of(m, x, t, s):
    """What is added to every pair (h, t, s), and the derivative of it by each number."""
    ahead = np.arange(s) - (np.arange(t)[:, None] + s - t)
    if m.distance == "slopes":
        return -x["slopes"][:, None, None] * abs(ahead), None
    row = np.vectorize(lambda a: bucket(a, m.buckets, m.max_distance, causal=m.causal))(ahead)
    return np.moveaxis(x["bucket_table"][row], 2, 0), row


def by_bias(m, x, cotangent=None, **masks):
    """The output, and the gradients, of softmax with a bias of pairs."""
    (b, t, *_), s = x["q"].shape, x["k"].shape[1]
    pairs, row = pairs_of(m, x, t, s)
    plain = {name: a for name, a in x.items() if name not in ("slopes", "bucket_table", "bias")}
    bias = np.broadcast_to(x.get("bias", 0) + pairs, (b, *pairs.shape))
    options = {"causal": m.causal, "window": m.window, "softcap": m.softcap, "sink": m.sink}
    dense = pa.Softmax(bias=True, forget=m.forget, **options)
    out, pullback = dense.vjp(**plain, bias=bias, **masks, backend="reference")
    if cotangent is None:
        return out
    gradients = pullback(cotangent)
    d_pairs = gradients.pop("bias").sum(axis=0)
    if "bias" in x:
        gradients["bias"] = d_pairs[None]
    if row is None:
        ahead = np.arange(s) - (np.arange(t)[:, None] + s - t)
        gradients["slopes"] = -np.sum(abs(ahead) * d_pairs, axis=(1, 2))
    else:
        gradients["bucket_table"] = np.zeros_like(x["bucket_table"])
        np.add.at(gradients["bucket_table"], row, np.moveaxis(d_pairs, 0, 2))
    return out, gradients


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


def assert_same(found, expected):
    (out, gradients), (dense, of_dense) = found, expected
    np.testing.assert_allclose(out, dense, atol=1e-11)
    assert gradients.keys() == of_dense.keys()
    for name, gradient in of_dense.items():
        np.testing.assert_allclose(gradients[name], gradient, atol=1e-10, err_msg=name)


@pytest.mark.parametrize(
    ("options", "backend"),
    [
        *((options, backend) for options in OPTIONS for backend in BACKENDS),
        *((options, "jax") for options in (OPTIONS[0], OPTIONS[2])),  # Each compiles for seconds.
    ],
    ids=str,
)
def test_outputs_and_gradients_are_those_of_a_bias_of_pairs(options, backend):
    m, x = pa.Softmax(**options), problem(options)
    if options.get("forget"):
        x = problem(options, t=150)
    cotangent = np.random.default_rng(1).normal(size=(*x["q"].shape[:3], 3))
    assert_same(called(m, x, cotangent, backend), by_bias(m, x, cotangent))


MASKS = {
    "lengths": np.asarray([150, 61]),
    "key_mask": np.random.default_rng(2).random((2, 150)) > 0.3,
    "segment_ids": np.asarray([[0] * 40 + [1] * 110, [0] * 149 + [1]]),
}


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, backend) for name in MASKS for backend in ("portable", "torch")),
        ("segment_ids", "jax"),
    ],
)
def test_masks_do_not_change_distances(name, backend):
    options = OPTIONS[1]
    m, x = pa.Softmax(**options), problem(options, t=150)
    cotangent = np.random.default_rng(1).normal(size=(2, 150, 6, 3))
    mask = {name: MASKS[name]}
    assert_same(called(m, x, cotangent, backend, **mask), by_bias(m, x, cotangent, **mask))


def test_a_packed_sequence_has_the_distances_of_its_own_tokens():
    m = pa.Softmax(distance="slopes")
    x = problem({"distance": "slopes"}, b=1, t=50, s=50)
    packed = m(**x, cu_seqlens=[0, 20, 50], backend="portable")
    second = {name: a if name == "slopes" else a[:, 20:] for name, a in x.items()}
    np.testing.assert_allclose(packed[:, 20:], m(**second), atol=1e-12)


@pytest.mark.parametrize("backend", ["reference", "portable"])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("distance", ["slopes", "buckets"])
def test_a_cache_has_the_distances_to_cached_keys(distance, window, backend):
    options = {"distance": distance, "window": window}
    m, x = pa.Softmax(**options), problem(options, t=40, s=40)
    of_tokens = ("q", "k", "v")
    lengths = np.asarray([11, 5])
    cache = m.init_cache(**x, capacity=64)
    first = {name: a[:, :11] if name in of_tokens else a for name, a in x.items()}
    # The second sequence is shorter: its next token is closer to the first.
    out, cache = m.extend(cache, **first, lengths=lengths, backend=backend)
    parts = [out]
    for start, stop in ((11, 12), (12, 30), (30, 31), (31, 40)):
        more = {name: a[:, start:stop] if name in of_tokens else a for name, a in x.items()}
        out, cache = m.extend(cache, **more, backend=backend)
        parts.append(out)
    found = np.concatenate(parts, axis=1)
    np.testing.assert_allclose(found[:1], m(**x)[:1], atol=1e-11)
    kept = {
        name: np.delete(a, range(5, 11), 1) if name in of_tokens else a for name, a in x.items()
    }
    alone = {name: a[1:] if name in of_tokens else a for name, a in kept.items()}
    np.testing.assert_allclose(np.delete(found[1:], range(5, 11), 1), m(**alone), atol=1e-11)


def test_jax_reads_a_cache_at_the_same_distances():
    jax = pytest.importorskip("jax")
    m = pa.Softmax(distance="buckets", buckets=8, max_distance=20)
    x = problem({"distance": "buckets", "buckets": 8}, t=30, s=30)
    with jax.enable_x64(True):
        arrays = {name: jax.numpy.asarray(a) for name, a in x.items()}
        cut = {name: a if name == "bucket_table" else a[:, :24] for name, a in arrays.items()}
        rest = {name: a if name == "bucket_table" else a[:, 24:] for name, a in arrays.items()}
        _, cache = m.extend(m.init_cache(**arrays, capacity=40), **cut, backend="jax")
        out, _ = m.extend(cache, **rest, backend="jax")
    np.testing.assert_allclose(out, m(**x)[:, 24:], atol=1e-11)


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


def test_a_shorthand_takes_the_input_and_refuses_another_number_of_rows():
    x = problem({"distance": "buckets"}, t=9, s=9)
    expected = pa.Softmax(distance="buckets")(**x)
    assert np.array_equal(pa.softmax(**x), expected)
    x["bucket_table"] = x["bucket_table"][:16]
    with pytest.raises(pa.ShapeError, match="bucket_table"):
        pa.softmax(**x)
    assert pa.softmax(**x, distance="buckets", buckets=16).shape == expected.shape
