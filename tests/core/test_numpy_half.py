"""Half precision in NumPy, with bfloat16 of ml_dtypes: inputs and outputs; float32 inside."""

import numpy as np
import pytest

import precondattn as pa

ml_dtypes = pytest.importorskip("ml_dtypes")

DTYPES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]


@pytest.mark.parametrize("backend", ["reference", "portable"])
@pytest.mark.parametrize("masked", ["", "lengths", "key_mask", "segment_ids"])
@pytest.mark.parametrize("expression", ["lucid(laser)", "ccq(gated_delta)"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outputs_and_gradients_have_the_dtype_of_the_call(dtype, expression, masked, backend):
    m = pa.parse(expression)
    sizes = {"b": 2, "t": 7, "s": 7, "h": 2, "n": 2, "u": 2, "d": 4, "e": 4, "m": 4}
    rng = np.random.default_rng(0)
    x = {n: rng.uniform(0.1, 0.9, p.shape(sizes)).astype(dtype) for n, p in m.inputs.items()}
    if "g" in x:
        x["g"] = -x["g"]
    masks = {
        "": {},
        "lengths": {"lengths": [7, 3]},
        "key_mask": {"key_mask": np.arange(7)[None] % 3 != np.ones((2, 1))},
        "segment_ids": {"segment_ids": np.repeat([[0, 1, 1, 1, 2, 2, 2]], 2, axis=0)},
    }[masked]
    out, pullback = m.vjp(**x, **masks, backend=backend)
    d_out = rng.normal(size=out.shape).astype(dtype)
    result = pullback(d_out)
    assert {out.dtype, *(d.dtype for d in result.values())} == {dtype}
    wide = {name: array.astype(np.float64) for name, array in x.items()}
    expected, pullback = m.vjp(**wide, **masks, backend="reference")
    np.testing.assert_allclose(out.astype(np.float64), expected, rtol=2e-2, atol=2e-2)
    for name, d in pullback(d_out.astype(np.float64)).items():
        np.testing.assert_allclose(result[name].astype(np.float64), d, rtol=2e-2, atol=5e-2)
