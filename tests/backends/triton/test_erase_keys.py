"""Triton's delta rule erases with another key than it writes with, as the definition does.

Keys repeat, and one is 0; gates are open, closed or in between.
"""

import numpy as np
import pytest

pytest.importorskip("triton")

import torch

from precondattn.spec.recurrence import Stream, recurrent, recurrent_vjp
from precondattn_triton.precision import exact
from precondattn_triton.recurrence.chunkwise import Chunkwise
from tests.backends.portable.test_erase_keys import assert_close, stream
from tests.backends.triton.tiles import small_tiles


def tensors(x):
    return Stream(*(None if a is None else torch.from_numpy(a).float() for a in x))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("gate", "s", "t", "erased"),
    [("head", 33, 33, "erase"), ("key", 17, 3, "erase"), ("head", 37, 5, "undecayed")],
)
def test_chunks_are_those_of_the_definition(gate, s, t, erased):
    x, state = stream(s, gate, t, erased, b=1, d={"head": 20, "key": 4}[gate])
    form = Chunkwise(exact(), half=False, decays=True)
    first = torch.from_numpy(state).float()
    expected, expected_last = recurrent(x, state)
    rng = np.random.default_rng(0)
    d_o, d_last = rng.normal(size=expected.shape), rng.normal(size=state.shape)
    with small_tiles():
        out, last = form.forward(tensors(x), first)
        d = form.vjp(tensors(x), first, *(torch.from_numpy(a).float() for a in (d_o, d_last)))
    assert_close(out, expected, 1e-5)
    assert_close(last, expected_last, 1e-5)
    expected = recurrent_vjp(x, state, d_o, d_last)
    assert_close(d.state, expected.state, 1e-5)
    for result, exact_one in zip(d.stream, expected.stream, strict=True):
        if exact_one is not None:
            assert_close(result, exact_one, 1e-5)


@pytest.mark.parametrize(
    ("gate", "erased"), [("head", "erase"), ("key", "erase"), ("head", "undecayed")]
)
def test_one_token_is_that_of_the_definition(gate, erased):
    x, state = stream(1, gate, erased=erased)
    with small_tiles():
        form = Chunkwise(exact(), half=False, decays=True)
        result = form.forward(tensors(x), torch.from_numpy(state).float())
    for one, expected in zip(result, recurrent(x, state), strict=True):
        assert_close(one, expected, 1e-6)


def test_erase_keys_may_have_fewer_heads_than_the_state():
    x, state = stream(17, "head", b=1, d=4)
    x = x._replace(erase=x.erase[:, :1])
    repeated = x._replace(erase=np.repeat(x.erase, 2, axis=1))
    expected, _ = recurrent(repeated, state)
    with small_tiles():
        form = Chunkwise(exact(), half=False, decays=True)
        out, _ = form.forward(tensors(x), torch.from_numpy(state).float())
    assert_close(out, expected, 1e-5)


def test_keys_that_are_erased_before_a_decay_of_channels_are_declined():
    x, state = stream(1, "key", erased="undecayed")
    form = Chunkwise(exact(), half=False, decays=True)
    with pytest.raises(ValueError, match="one decay per head"):
        form.forward(tensors(x), torch.from_numpy(state).float())
