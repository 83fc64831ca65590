"""Calls as in a CUDA graph: no entry is read, and a donated cache is updated where it is.

A CPU stands in for a GPU that captures the calls; replaying them is calling them again.
"""

from contextlib import contextmanager

import pytest

pytest.importorskip("torch")

import torch

import precondattn as pa
from precondattn.execution import preparation
from precondattn.frameworks.torch.framework import PyTorch
from precondattn_conformance.inputs import CallLayout, make_inputs, slice_tokens

LENGTH = 6
MECHANISMS = ("lucid", "path", "gated_delta", "softmax", "laser", "ccq(gated_delta)", "kda")


@contextmanager
def captured():
    """Context in which calls are captured, and whatever reads an entry fails."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PyTorch, "is_captured", lambda *_: True)
        patch.setattr(PyTorch, "reads_at_once", False)
        patch.setattr(preparation, "prepared_calls", {})
        for name in ("item", "tolist", "numpy", "nonzero", "__bool__", "__index__"):
            patch.setattr(torch.Tensor, name, _reads)
        yield


def _reads(*_):
    raise AssertionError("an entry is read")


def inputs_of(m, tokens=LENGTH):
    x = make_inputs(m, CallLayout("test", b=2, t=tokens, s=tokens), "random")
    return {name: torch.from_numpy(array) for name, array in x.items()}


@pytest.mark.parametrize("expression", MECHANISMS)
def test_one_step_is_replayed_with_a_cache_that_stays_where_it_is(expression):
    m = pa.parse(expression)
    x = inputs_of(m)
    expected, cache, outs = m(**x), m.init_cache(**x, capacity=LENGTH), []
    buffers = dict(cache.store)
    with torch.no_grad(), captured():
        for i in range(LENGTH):
            given = pa.Cache(cache.length, dict(buffers), cache.kinds)
            token = slice_tokens(m, x, i, i + 1)
            out, after = m.extend(given, **token, donate=True, backend="reference")
            assert all(after.store[name] is buffers[name] for name in buffers)
            cache.length.copy_(after.length)
            outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 1), expected)


def test_a_full_cache_gives_nan_and_no_error():
    m = pa.Lucid()
    x = inputs_of(m)
    cache = m.init_cache(**x, capacity=LENGTH)
    with torch.no_grad(), captured():
        cache = m.extend(cache, **x, donate=True)[1]
        out, _ = m.extend(cache, **slice_tokens(m, x, 0, 1), donate=True)
    assert out.isnan().all()


@pytest.mark.parametrize("expression", ["lucid", "gated_delta", "path", "laser"])
def test_full_calls_with_masks_read_no_entry(expression):
    m = pa.parse(expression)
    x = {name: array.requires_grad_() for name, array in inputs_of(m).items()}
    lengths, ids = torch.tensor([4, 6]), torch.tensor([[0, 0, 1, 1, 1, 1]] * 2)
    for mask in ({}, {"lengths": lengths}, {"key_mask": ids > 0}, {"segment_ids": ids}):
        with captured():
            out = m(**x, **mask, backend="reference")
            found = torch.autograd.grad(out, [*x.values()], torch.ones_like(out))
        expected = m(**x, **mask, backend="reference")
        torch.testing.assert_close(out, expected)
        assert all(d.isfinite().all() for d in found)
