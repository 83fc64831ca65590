"""PaTH's pending reflections, after a call that flushed the cached keys."""

from itertools import pairwise

import numpy as np
import pytest

import precondattn as pa
from precondattn_conformance.inputs import CallLayout, make_inputs, slice_tokens


@pytest.mark.parametrize("first", [4, 5, 6, 7])
def test_tokens_after_a_flush_are_those_of_a_full_call(first):
    mechanism = pa.parse("path[flush=4]")
    x = make_inputs(mechanism, CallLayout("test", t=12, s=12), "random")
    cache, outs = mechanism.init_cache(**x, capacity=12), []
    edges = [0, *range(first, 13)]
    for start, stop in pairwise(edges):
        tokens = slice_tokens(mechanism, x, start, stop)
        out, cache = mechanism.extend(cache, **tokens, backend="portable")
        outs.append(out)
    expected = mechanism(**x, backend="reference")
    np.testing.assert_allclose(np.concat(outs, axis=1), expected, rtol=1e-12, atol=1e-12)
