"""The work of a step depends on the number of cached tokens, not on the capacity.

PyTorch's dispatcher records the largest array that a call reads or writes. Views are not counted,
and nothing is measured in seconds.
"""

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import precondattn as pa
from precondattn_conformance.inputs import CallLayout, make_inputs, slice_tokens

HELD, SMALL, LARGE = 64, 256, 8192

MECHANISMS = (
    "softmax",
    "softmax[window=3]",
    "softmax[forget=unscaled]",
    "laser",
    "lucid",
    "lucid[normalize=rows]",
    "lucid(softmax[window=3])",
    "lucid(laser)",
    "path",
    "path[forget=scaled,flush=3]",
    "lucid(path)",
    "lucid(path[flush=3])",
    "differential",
    "ccq[covariance=query_weighted](linear)",
    "gated_delta",
)


class Largest(TorchDispatchMode):
    """The most entries of an array that is computed with."""

    def __init__(self):
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        results = function._schema.returns
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in results)
        # These access the rows of an index only.
        is_of_rows = function in (torch.ops.aten.index_put_.default, torch.ops.aten.index.Tensor)
        if not is_view and not is_of_rows:
            for x in tree_leaves((args, kwargs, out)):
                if isinstance(x, torch.Tensor):
                    self.entries = max(self.entries, x.numel())
        return out


def prompt_and_token(mechanism, library):
    layout = CallLayout("test", b=2, t=HELD + 1, s=HELD + 1)
    x = {name: library(a) for name, a in make_inputs(mechanism, layout, "random").items()}
    return x, *(slice_tokens(mechanism, x, *ends) for ends in ((0, HELD), (HELD, HELD + 1)))


def largest_array_of_a_step(mechanism, capacity, lengths):
    x, prompt, token = prompt_and_token(mechanism, torch.as_tensor)
    cache = mechanism.init_cache(**x, capacity=capacity)
    with torch.no_grad():
        _, cache = mechanism.extend(cache, **prompt, lengths=lengths, donate=True)
        with Largest() as largest:
            mechanism.extend(cache, **token, donate=True)
    return largest.entries


@pytest.mark.parametrize("lengths", [None, (HELD, HELD - 5)], ids=["equal", "ragged"])
@pytest.mark.parametrize("expression", MECHANISMS)
def test_a_donated_step_computes_with_no_array_that_grows_with_the_capacity(expression, lengths):
    mechanism = pa.parse(expression)
    small, large = (largest_array_of_a_step(mechanism, c, lengths) for c in (SMALL, LARGE))
    assert large == small


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("lengths", [None, (HELD, HELD - 5)], ids=["equal", "ragged"])
@pytest.mark.parametrize("expression", [m for m in MECHANISMS if m != "softmax[window=3]"])
def test_the_cache_does_not_depend_on_the_capacity(expression, lengths, donate):
    """The cache of a softmax with a window, which is not here, has no capacity."""
    mechanism = pa.parse(expression)
    x, prompt, token = prompt_and_token(mechanism, np.asarray)
    found = []
    for capacity in (HELD + 1, HELD + 40):
        cache = mechanism.init_cache(**x, capacity=capacity)
        _, cache = mechanism.extend(cache, **prompt, lengths=lengths, donate=donate)
        strides = {name: buffer.strides for name, buffer in cache.store.items()}
        out, cache = mechanism.extend(cache, **token, donate=donate)
        assert {name: buffer.strides for name, buffer in cache.store.items()} == strides
        found.append((out, cache))
    (out, cache), (other_out, other) = found
    np.testing.assert_allclose(other_out, out, rtol=1e-12, atol=1e-12)
    for name, buffer in cache.store.items():
        rows = other.store[name][:, : buffer.shape[1]]
        np.testing.assert_allclose(rows, buffer, rtol=1e-12, atol=1e-12)
        np.testing.assert_array_equal(other.store[name][:, buffer.shape[1] :], 0)


@pytest.mark.parametrize("whole", [np.int64, np.uint8, np.asarray])
def test_an_integer_of_any_type_is_a_whole_number_and_a_boolean_is_none(whole):
    q, m = np.ones((1, 4, 2, 3)), pa.Linear()
    cache = pa.Lucid().init_cache(q, q, q, capacity=whole(8), sequences=whole(1))
    assert cache.grow(whole(9)).crop(whole(0)).capacity == 9
    m.extend(m.init_cache(q, q, q), q, q, q, keep=whole(2))
    assert str(pa.Path(window=whole(3), flush=whole(2))) == "path[window=3,flush=2]"
    assert pa.alignment(q, whole(2)).shape == (1, 4, 2)
    for refused in (True, np.bool_(True), 2.0):
        with pytest.raises(ValueError, match="capacity must be a whole number, 1 or above"):
            m.init_cache(q, q, q, capacity=refused)
