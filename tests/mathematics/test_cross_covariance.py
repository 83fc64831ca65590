"""Cross-covariance attention (XCA) against loops over channels, and its identities."""

import numpy as np
import pytest

import precondattn as pa
from tests.mathematics.identities import assert_close


def inputs(seed=0, *, b=2, t=7, h=4, n=2, d=3):
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(b, t, h, d))
    k, v = rng.normal(size=(2, b, t, n, d))
    return {"q": q, "k": k, "v": v, "logit_scale": rng.normal(size=h)}


def by_loops(q, k, v, logit_scale, eps=1e-6):
    """Channel by channel, with nothing shared with the leaf."""
    out = np.zeros_like(q)
    (b, _, h, d), group = q.shape, q.shape[2] // k.shape[2]
    for sequence, head in np.ndindex(b, h):
        of = (sequence, slice(None), head // group)
        for i in range(d):
            row = q[sequence, :, head, i]
            weights = np.zeros(d)
            for j in range(d):
                column = k[of][:, j]
                lengths = np.sqrt((row @ row + eps) * (column @ column + eps))
                weights[j] = np.exp(logit_scale[head] * (row @ column) / lengths)
            out[sequence, :, head, i] = v[of] @ (weights / weights.sum())
    return out


def shuffled(x, order):
    return {name: array[:, order] if array.ndim == 4 else array for name, array in x.items()}


def test_the_output_is_that_of_loops_over_channels():
    assert_close(pa.cross_covariance(**inputs()), by_loops(**inputs()))


def test_the_tokens_may_be_in_any_order():
    x, order = inputs(), np.random.default_rng(2).permutation(7)
    attn = pa.CrossCovariance()
    assert_close(attn(**shuffled(x, order)), attn(**x)[:, order])


def test_lengths_of_channels_have_no_effect():
    x, attn = inputs(), pa.CrossCovariance(eps=0)
    factors = np.exp(np.random.default_rng(3).normal(size=3))
    scaled = x | {"q": factors * x["q"], "k": x["k"] / factors}
    assert_close(attn(**scaled), attn(**x))


def test_a_scale_of_zero_gives_the_mean_of_the_channels():
    x = inputs() | {"logit_scale": np.zeros(4)}
    mean = x["v"].mean(axis=-1, keepdims=True)
    assert_close(pa.cross_covariance(**x), np.repeat(mean, 2, axis=2))


def without(x, masked):
    """The inputs of the first sequence, without some tokens."""
    return {n: np.delete(a[:1], masked, axis=1) if a.ndim == 4 else a for n, a in x.items()}


def test_masked_keys_are_tokens_that_are_not_there():
    x = inputs()
    key_mask = np.ones((2, 7), dtype=bool)
    key_mask[0, [1, 4]] = False
    x["q"][0, 1] = np.inf  # Its query too is in no norm.
    out = pa.cross_covariance(**x, key_mask=key_mask)
    assert_close(np.delete(out[:1], [1, 4], axis=1), pa.cross_covariance(**without(x, [1, 4])))
    assert not out[0, [1, 4]].any()


def test_segments_that_are_traced_give_the_same():
    jax = pytest.importorskip("jax")
    x = {name: array.astype(np.float32) for name, array in inputs().items()}
    ids = np.asarray([[0] * 4 + [1] * 3, [2] * 7], dtype=np.int32)

    def loss(x, ids):
        return (pa.cross_covariance(**x, segment_ids=ids, backend="reference") ** 2).sum()

    traced = jax.jit(jax.grad(loss))({n: jax.numpy.asarray(a) for n, a in x.items()}, ids)
    out, pullback = pa.CrossCovariance().vjp(**x, segment_ids=ids)
    for name, gradient in pullback(2 * out).items():
        np.testing.assert_allclose(traced[name], gradient, atol=1e-5)


def test_row_normalized_makes_channels_one_long():
    x = inputs()
    rows = pa.RowNormalized(pa.CrossCovariance())
    out = rows(**x)
    assert_close(np.sum(out**2, axis=1), np.ones((2, 4, 3)))
    assert rows == pa.parse("row_normalized(cross_covariance)")
    assert_close(out, pa.parse("row_normalized[axis=channel](cross_covariance)")(**x))
    tokens = pa.parse("row_normalized[axis=token](cross_covariance)")(**x)
    assert_close(np.sum(tokens**2, axis=3), np.ones((2, 7, 4)))


def test_its_differential_is_a_difference():
    x, second = inputs(), inputs(5)
    paired = {"q2": second["q"], "k2": second["k"], "lam": np.asarray(0.4)}
    out = pa.parse("differential(cross_covariance)")(**x, **paired)
    other = pa.cross_covariance(**(x | {"q": second["q"], "k": second["k"]}))
    assert_close(out, pa.cross_covariance(**x) - 0.4 * other)


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("lucid(cross_covariance)", "one score for each pair of tokens"),
        ("laser(cross_covariance)", "takes means over channels, and laser needs one over tokens"),
        ("temperature(cross_covariance)", "normalises its queries"),
        ("per_dim_scale(cross_covariance)", "normalises its queries"),
        ("qk_norm(cross_covariance)", "normalises its queries already"),
        ("ccq(cross_covariance)", "the base is not causal"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(expression, reason):
    with pytest.raises(TypeError, match=reason):
        pa.parse(expression)


def test_bad_input_is_named():
    x = inputs()
    fewer = x | {"q": x["q"][:, :3]}
    with pytest.raises(
        ValueError, match=r"the same tokens of queries and keys.*found t = 3 and s = 7"
    ):
        pa.cross_covariance(**fewer)
    with pytest.raises(ValueError, match="is not causal, so it can not have a cache"):
        pa.CrossCovariance().init_cache(**x, capacity=7)
    with pytest.raises(ValueError, match="v is declared"):
        pa.cross_covariance(**(x | {"v": x["v"][..., :2]}))
    with pytest.raises(TypeError, match="causal"):
        pa.cross_covariance(**x, causal=True)
    with pytest.raises(ValueError, match="causal"):
        pa.parse("cross_covariance[causal=true]")
