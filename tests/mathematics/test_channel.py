"""Channel attention against attention between channels as tokens, and its identities."""

import numpy as np
import pytest

import precondattn as pa
from tests.mathematics.identities import assert_close


def inputs(seed=0, *, b=2, t=7, h=4, n=2, d=3):
    rng = np.random.default_rng(seed)
    k, v = rng.normal(size=(2, b, t, n, d))
    return {"q": rng.normal(size=(b, t, h, d)), "k": k, "v": v}


def between_channels(q, k, v, scale):
    """Dense attention whose tokens are channels, head by head."""
    out = np.zeros_like(q)
    for b, head in np.ndindex(q.shape[0], q.shape[2]):
        of = b, slice(None), head * k.shape[2] // q.shape[2]
        weights = np.exp(scale * q[b, :, head].T @ k[of])
        out[b, :, head] = v[of] @ (weights / weights.sum(axis=1, keepdims=True)).T
    return out


@pytest.mark.parametrize("backend", ["reference", "portable"])
@pytest.mark.parametrize(
    ("expression", "scale"),
    [("channel", 3**-0.5), ("channel[scale_by=tokens]", 7**-0.5), ("channel[scale=2]", 2.0)],
)
def test_the_output_is_that_of_attention_between_channels(expression, scale, backend):
    x = inputs()
    assert_close(pa.parse(expression)(**x, backend=backend), between_channels(**x, scale=scale))


def test_with_channels_of_length_one_and_a_learned_factor_it_is_xcits():
    x = inputs()
    unit = {n: x[n] / np.linalg.vector_norm(x[n], axis=1, keepdims=True) for n in "qk"}
    expected = pa.CrossCovariance(eps=0)(**x, logit_scale=np.full(4, 1.3))
    assert_close(pa.Channel(scale=1.3)(**(x | unit)), expected)


def without(x, masked):
    return {name: np.delete(array[:1], masked, axis=1) for name, array in x.items()}


@pytest.mark.parametrize("scale_by", ["width", "tokens"])
def test_masked_tokens_padding_and_other_segments_are_not_there(scale_by):
    x, attn = inputs(), pa.Channel(scale_by=scale_by)
    first = attn(**without(x, [4, 5, 6]))
    packed = attn(**x, segment_ids=np.asarray([[0] * 4 + [1] * 3] * 2))
    assert_close(packed[:1, :4], first)
    assert_close(packed[:1, 4:], attn(**without(x, [0, 1, 2, 3])))
    x["q"][0, 4:] = np.nan
    assert_close(attn(**x, lengths=[4, 7])[:1, :4], first)
    x = inputs()
    keep = np.ones((2, 7), bool)
    keep[0, [1, 4]] = False
    x["q"][0, 1] = np.inf
    out = attn(**x, key_mask=keep)
    assert_close(np.delete(out[:1], [1, 4], axis=1), attn(**without(x, [1, 4])))
    assert not out[0, [1, 4]].any()


def test_row_normalized_makes_channels_one_long():
    x = inputs()
    out = pa.parse("row_normalized(channel)")(**x)
    assert_close(np.sum(out**2, axis=1), np.ones((2, 4, 3)))
    assert_close(out, pa.parse("row_normalized[axis=channel](channel)")(**x))


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("lucid(channel)", "one score for each pair of tokens"),
        ("laser(channel)", "takes means over channels, and laser needs one over tokens"),
        ("ccq(channel)", "the base is not causal"),
        ("mesa(channel)", "the base is not causal"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(expression, reason):
    with pytest.raises(TypeError, match=reason):
        pa.parse(expression)


def test_bad_input_is_named():
    x = inputs()
    with pytest.raises(ValueError, match=r"the same tokens.*found t = 3 and s = 7"):
        pa.channel(**(x | {"q": x["q"][:, :3]}))
    with pytest.raises(ValueError, match="is not causal, so it can not have a cache"):
        pa.Channel().init_cache(**x, capacity=7)
    with pytest.raises(ValueError, match="v is declared"):
        pa.channel(**(x | {"v": x["v"][..., :2]}))
    with pytest.raises(ValueError, match=r"scale=0\.3 is the factor .* give one of them"):
        pa.parse("channel[scale=0.3,scale_by=tokens]")
