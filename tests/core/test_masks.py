"""Masks: masked entries have no effect, whatever they contain."""

import numpy as np
import pytest

import precondattn as pa
from precondattn_conformance.declared import expressions
from precondattn_conformance.inputs import CallLayout, make_inputs
from tests.representatives import REPRESENTATIVES

LAYOUT = CallLayout("test", b=2, t=6, s=6)


def with_nan(m, x, is_masked):
    """The inputs with NaN at masked keys (b, s), and at the queries of the same tokens."""
    result = {}
    for name, array in x.items():
        array = array.copy()
        if "s" in m.inputs[name].letters:
            array[is_masked] = np.nan
        result[name] = array
    return result


def of_tokens(m, x, index):
    """The inputs at some tokens; inputs without a token axis unchanged."""
    return {n: a if m.inputs[n].time_axis is None else a[index] for n, a in x.items()}


@pytest.mark.parametrize("expression", REPRESENTATIVES)
def test_nan_after_the_length_reaches_neither_outputs_nor_gradients(expression):
    m = pa.parse(expression)
    x = make_inputs(m, LAYOUT, "clustered")
    lengths = np.asarray([4, 0])
    padding = np.arange(6) >= lengths[:, None]
    bad = {name: array.copy() for name, array in x.items()}
    for name, array in bad.items():
        if m.inputs[name].is_pairwise:
            array[np.broadcast_to(padding[:, None, :, None], array.shape)] = np.nan
            array[np.broadcast_to(padding[:, None, None, :], array.shape)] = np.nan
        elif m.inputs[name].time_axis is not None:
            array[padding] = np.nan
    expected, expected_pullback = m.vjp(**x, lengths=lengths)
    out, pullback = m.vjp(**bad, lengths=lengths)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(out[padding], 0)
    cotangent = np.ones_like(out)
    behind = padding.reshape(*padding.shape, *(1,) * (out.ndim - 2))
    bad_cotangent = np.where(behind, np.nan, cotangent)
    gradients = pullback(bad_cotangent)
    for name, gradient in expected_pullback(cotangent).items():
        np.testing.assert_array_equal(gradients[name], gradient)
        if not m.inputs[name].is_pairwise and m.inputs[name].time_axis is not None:
            np.testing.assert_array_equal(gradient[padding], 0)


def loses_nothing_but_the_key(m):
    """Whether the call without a key is the call that masks it.

    An input of pairs has two axes to lose. A window and a distance count positions, a later key
    would lie in another window of a grid, and a channel's norm and a landmark are over all queries.
    """
    if m.offers.window is not None or any(p.is_pairwise for p in m.inputs.values()):
        return False
    return not any(
        isinstance(leaf, pa.Nystrom | pa.Outlook | pa.Windowed)
        or (isinstance(leaf, pa.UnitRows) and leaf.axis == "channel")
        or getattr(leaf, "distance", "none") != "none"
        for leaf in m.program.leaves
    )


def test_masking_a_key_equals_removing_it():
    """This holds in the base and in the preconditioner; the key's position is removed too."""
    is_kept = np.asarray([True, False, True, True, False, True])
    key_mask = np.broadcast_to(is_kept, (2, 6))
    for m in filter(loses_nothing_but_the_key, map(pa.parse, expressions(pieces=False))):
        x = make_inputs(m, LAYOUT, "clustered")
        out = m(**with_nan(m, x, ~key_mask), key_mask=key_mask)
        without = m(**of_tokens(m, x, (slice(None), is_kept)))
        np.testing.assert_allclose(out[:, is_kept], without, rtol=1e-10, atol=1e-12, err_msg=str(m))


@pytest.mark.parametrize("expression", [e for e in REPRESENTATIVES if "bias" not in e])
def test_packed_sequences_are_independent(expression):
    m = pa.parse(expression)
    x = make_inputs(m, LAYOUT, "clustered")
    segment_ids = np.asarray([[7, 7, 3, 3, 3, 9], [1, 1, 1, 1, 0, 0]])
    out = m(**x, segment_ids=segment_ids)
    for i, row in enumerate(segment_ids):
        for segment in np.unique(row):
            alone = of_tokens(m, x, (slice(i, i + 1), row == segment))
            np.testing.assert_allclose(
                out[i, row == segment], m(**alone)[0], rtol=1e-10, atol=1e-12
            )


def test_grouped_queries_equal_repeated_key_value_heads():
    for m in map(pa.parse, expressions(pieces=False)):
        x = make_inputs(m, LAYOUT, "clustered")
        repeated = {}
        for name, array in x.items():
            heads = m.inputs[name].letters.find("n")
            repeated[name] = array if heads < 0 else np.repeat(array, 2, axis=heads)
        np.testing.assert_allclose(m(**x), m(**repeated), rtol=1e-10, atol=1e-12, err_msg=str(m))


@pytest.mark.parametrize("masks", [{"lengths": [4, 3]}, {"key_mask": np.eye(2, 6) < 1}])
def test_the_gradient_of_a_shared_bias_has_the_shape_of_the_bias(masks):
    m = pa.Softmax(bias=True)
    x = make_inputs(m, LAYOUT._replace(broadcast="bh"), "random")
    assert x["bias"].shape == (1, 1, 6, 6)
    out, pullback = m.vjp(**x, **masks)
    result = pullback(np.ones_like(out) * out)["bias"]
    each = {**x, "bias": np.repeat(x["bias"], 2, axis=0)}
    out, pullback = m.vjp(**each, **masks)
    expected = pullback(np.ones_like(out) * out)["bias"]
    assert result.shape == (1, 1, 6, 6)
    np.testing.assert_allclose(result, expected.sum(axis=(0,), keepdims=True))


def test_a_padded_block_as_long_as_the_cache_uses_the_bias_of_past_keys():
    m = pa.Softmax(bias=True)
    x = make_inputs(m, CallLayout("test", b=1, t=4, s=4), "random")
    expected = m(**x)
    cache = m.init_cache(**{name: x[name] for name in "qkv"}, capacity=4)
    for done in range(4):
        # One token, in a block of four of which three are padding.
        block = {name: np.roll(x[name], -done, axis=1) for name in "qkv"}
        bias = np.roll(x["bias"], -done, axis=2)
        out, cache = m.extend(cache, **block, bias=bias, lengths=[1])
        np.testing.assert_allclose(out[:, 0], expected[:, done], rtol=1e-10)


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("window", [2**31 - 1, 2**31, 2**40])
def test_a_window_above_the_sequence_is_no_window(library, window):
    xp = pytest.importorskip({"jax": "jax.numpy"}.get(library, library))
    for m, windowed in (
        (pa.Softmax(causal=False), pa.Softmax(causal=False, window=window)),
        (pa.Lucid(), pa.Lucid(pa.Softmax(window=window))),
        (pa.Path(), pa.Path(window=window)),
    ):
        x = make_inputs(m, LAYOUT, "clustered")
        arrays = {name: xp.asarray(array.astype(np.float32)) for name, array in x.items()}
        np.testing.assert_array_equal(np.asarray(windowed(**arrays)), np.asarray(m(**arrays)))
        assert str(windowed) == str(m)
