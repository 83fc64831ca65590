"""Outlook attention of large images, in blocks of rows of windows."""

import numpy as np
import pytest

import precondattn as pa
from precondattn.frame import full_frame
from precondattn_portable.arithmetic import IN_PLACE, STANDARD
from precondattn_portable.outlook import OutlookRows
from tests.mathematics.identities import assert_close


@pytest.mark.parametrize("ops", [IN_PLACE, STANDARD], ids=["in place", "standard"])
@pytest.mark.parametrize("mask", ["none", "lengths", "keys"])
@pytest.mark.parametrize(
    ("expression", "tokens"),
    [
        ("outlook[size=2/3,grid=5]", 33),
        ("outlook[stride=2,grid=5]", 33),
        ("outlook[size=4,stride=3]", 23),
        ("outlook[size=3,stride=4/5,grid=7]", 60),
    ],
)
def test_blocks_of_rows_are_the_definition(monkeypatch, expression, tokens, mask, ops):
    m, rng = pa.parse(expression), np.random.default_rng(tokens)
    sizes = {"b": 2, "t": tokens, "s": tokens, "h": 4, "n": 2, "e": 3}
    x = {name: rng.normal(size=p.shape(sizes)) for name, p in m.inputs.items()}
    cotangent = rng.normal(size=(2, tokens, 4, 3))
    masks = {
        "none": {},
        "lengths": {"lengths": np.asarray([tokens - 9, tokens])},
        "keys": {"key_mask": rng.random((2, tokens)) < 0.7},
    }[mask]
    frame = full_frame(tokens, tokens, x["v"], **masks)
    expected, _ = m.forward(x, frame)
    gradients = m.backward(x, frame, expected, (), cotangent)
    given = {name: array.copy() for name, array in x.items()}
    for together in (1, 2000):
        monkeypatch.setattr(OutlookRows, "entries_together", together)
        algorithm = OutlookRows(ops, m)
        out, residuals = algorithm.forward(given, frame)
        assert_close(out, expected)
        found = algorithm.backward(given, frame, out, residuals, cotangent)
        for name, gradient in gradients.items():
            assert_close(found[name], gradient)
            np.testing.assert_array_equal(given[name], x[name])
