"""Masks: identities of the definition, and sizes that a mask or a window may have."""

import numpy as np
import pytest

import precondattn as pa
from precondattn_conformance.declared import expressions
from precondattn_conformance.inputs import CallLayout, make_inputs

LAYOUT = CallLayout("test", b=2, t=6, s=6)


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
    for m in filter(loses_nothing_but_the_key, map(pa.parse, expressions(pieces=False))):
        x = make_inputs(m, LAYOUT, "clustered")
        bad, without = {}, {}
        for name, array in x.items():
            bad[name], without[name] = array.copy(), array
            if "s" in m.inputs[name].letters:
                bad[name][:, ~is_kept] = np.nan
            if m.inputs[name].time_axis is not None:
                without[name] = array[:, is_kept]
        out = m(**bad, key_mask=np.broadcast_to(is_kept, (2, 6)))[:, is_kept]
        np.testing.assert_allclose(out, m(**without), rtol=1e-10, atol=1e-12, err_msg=str(m))


@pytest.mark.parametrize("masks", [{"lengths": [4, 3]}, {"key_mask": np.eye(2, 6) < 1}])
def test_the_gradient_of_a_shared_bias_is_the_sum_over_those_that_share_it(masks):
    m = pa.Softmax(bias=True)
    x = make_inputs(m, LAYOUT._replace(broadcast="bh"), "random")
    assert x["bias"].shape == (1, 1, 6, 6)
    gradients = []
    for bias in (x["bias"], np.repeat(x["bias"], 2, axis=0)):
        out, pullback = m.vjp(**x | {"bias": bias}, **masks)
        gradients.append(pullback(out)["bias"])
    np.testing.assert_allclose(gradients[0], gradients[1].sum(axis=0, keepdims=True))


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


@pytest.mark.parametrize(
    ("library", "window"),
    [("numpy", 2**31 - 1), ("numpy", 2**40), ("torch", 2**31), ("torch", 2**40), ("jax", 2**31)],
)
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


@pytest.mark.parametrize("backend", ["reference", "portable"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("expression", "masks"),
    [
        ("lucid(laser)", {"key_mask": np.arange(6)[None] % 3 != np.ones((2, 1))}),
        ("lucid(laser)", {"lengths": [6, 3]}),
        ("ccq(gated_delta)", {"segment_ids": [[0, 1, 1, 1, 2, 2]] * 2}),
        ("ccq(gated_delta)", {}),
    ],
)
def test_half_precision_of_numpy_is_that_of_the_inputs_and_outputs(
    expression, masks, dtype, backend
):
    m, masks = pa.parse(expression), {name: np.asarray(mask) for name, mask in masks.items()}
    dtype = np.dtype(getattr(pytest.importorskip("ml_dtypes"), dtype, dtype))
    x = {n: a.astype(dtype) for n, a in make_inputs(m, LAYOUT, "clustered").items()}
    out, pullback = m.vjp(**x, **masks, backend=backend)
    gradients = pullback(out)
    assert {out.dtype, *(d.dtype for d in gradients.values())} == {dtype}
    wide = {name: array.astype(np.float64) for name, array in x.items()}
    expected, pullback = m.vjp(**wide, **masks, backend="reference")
    np.testing.assert_allclose(out.astype(np.float64), expected, rtol=2e-2, atol=2e-2)
    for name, d in pullback(out.astype(np.float64)).items():
        np.testing.assert_allclose(gradients[name].astype(np.float64), d, rtol=2e-2, atol=5e-2)
