"""No call modifies its inputs, masks or cache, even when it raises an error.

The conformance suite compares inputs and caches after calls that succeed.
"""

import numpy as np
import pytest

import precondattn as pa
from tests.core.inputs import inputs_of

MASKS = {
    "lengths": np.asarray([3, 4]),
    "key_mask": np.asarray([[True, False, True, True], [True] * 4]),
    "segment_ids": np.asarray([[0, 0, 1, 1], [5, 5, 5, 2]]),
}
TORN, BEYOND = np.asarray([[0, 1, 0, 1], [0, 0, 0, 0]]), np.asarray([3, 5])
CALLS = [
    ({}, {"backend": "tritn", "lengths": MASKS["lengths"]}, "unknown backend 'tritn'"),
    ({}, MASKS | {"lengths": BEYOND}, "lengths must lie between 0 and s = 4"),
    ({}, MASKS | {"segment_ids": TORN}, "segment_ids must be contiguous"),
    ({"k": np.s_[..., :2]}, MASKS, "k is declared"),
]
EXTENSIONS = [
    ({"lengths": BEYOND}, "lengths must lie between 0 and t = 4"),
    ({"key_mask": MASKS["key_mask"][:, :3]}, "key_mask is declared"),
    ({"backend": "tritn"}, "unknown backend 'tritn'"),
    ({"capacity": 0}, "capacity exceeded"),
]
TEXTS = (
    *("softmax[causal=false]", "softmax[bias=true]", "lucid[beta=true]", "path[forget=scaled]"),
    *("differential[per=token]", "gated_delta"),
)


class WatchedArrays:
    """Arrays of a library, and their entries as they were."""

    def __init__(self, asarray, arrays):
        self.now = {name: asarray(array) for name, array in arrays.items()}
        self.before = {name: np.asarray(array).copy() for name, array in arrays.items()}

    def require_unchanged(self, act):
        for name, array in self.before.items():
            found = np.asarray(self.now[name])
            np.testing.assert_array_equal(found, array, err_msg=f"{name}: {act}", strict=True)


@pytest.mark.parametrize(("text", "library"), [(t, "numpy") for t in TEXTS] + [(TEXTS[2], "torch")])
def test_no_input_mask_or_cache_is_modified_even_when_an_error_is_raised(text, library):
    asarray, m = pytest.importorskip(library).asarray, pa.parse(text)
    made = inputs_of(m, t=4, h=2, d=3, e=3)
    for name in "qkv":
        made[name][0, 3:] = np.nan  # A masked position.
    given, masks = WatchedArrays(asarray, made), WatchedArrays(asarray, MASKS)
    x = given.now

    def refused(call, *arguments, words, act, **named):
        with pytest.raises((TypeError, ValueError), match=words):
            call(*arguments, **named)
        for watched in (given, masks):
            watched.require_unchanged(act)

    def moved(options):
        return {n: o if isinstance(o, str) else asarray(o) for n, o in options.items()}

    for cut, options, words in CALLS:
        changed = {name: x[name][index] for name, index in cut.items()}
        refused(m, **x | changed, **moved(options), words=words, act=words)
    out, pullback = m.vjp(**x, **masks.now)
    m.explain(**x, **masks.now)
    pullback(out)
    refused(pullback, out[:1], words="the cotangent must have the output's shape", act="pullback")
    if not m.offers.causal:
        return
    if "bias" in x:
        x = x | {"bias": asarray(np.ones((2, 2, 4, 8)))}
    lengths, key_mask = masks.now["lengths"], masks.now["key_mask"]
    cache = m.init_cache(**x, capacity=8, key_mask=True)
    _, cache = m.extend(cache, **x, lengths=lengths, key_mask=key_mask)
    _, full = m.extend(cache, **x)
    for kept in (cache, full):
        buffers = {"length": kept.length, **kept.store}
        watched = WatchedArrays(lambda array: array, buffers)
        for options, words in EXTENSIONS:
            if ("capacity" in options) != (kept is full) or (kept is full and m.recurrence):
                continue
            options = moved({n: o for n, o in options.items() if n != "capacity"})
            for donate in (False, True):
                refused(m.extend, kept, **x, **options, donate=donate, words=words, act=words)
                watched.require_unchanged(words)
