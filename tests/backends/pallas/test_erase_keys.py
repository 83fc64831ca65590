"""Pallas's delta rule erases with another key than it writes with, as the definition does.

Keys repeat, and one is 0; gates are open, closed or in between.
"""

import numpy as np
import pytest

pytest.importorskip("jax")

import jax.numpy as jnp

from precondattn.spec.recurrence import Stream, recurrent, recurrent_vjp
from precondattn_pallas.configurations import REGISTRY, Configuration
from precondattn_pallas.precision import Products
from precondattn_pallas.recurrence.chunkwise import Chunkwise
from tests.backends.pallas.tiles import quick, small_tiles
from tests.backends.portable.test_erase_keys import assert_close, stream

TILES = {
    key.kernel: Configuration(16, 16)
    for key in REGISTRY.untuned
    if key.kernel.startswith(("chunk_", "channel_", "delta_"))
}


def float32(x):
    return Stream(*(None if a is None else jnp.asarray(a, dtype="float32") for a in x))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("gate", "s", "t", "erased"),
    [("head", 33, 33, "erase"), ("key", 17, 3, "erase"), ("head", 37, 5, "undecayed")],
)
def test_chunks_are_those_of_the_definition(gate, s, t, erased):
    x, state = stream(s, gate, t, erased, b=1, d={"head": 20, "key": 4}[gate])
    form = Chunkwise(Products(interpret=True, tf32=False), jnp.float32, decays=True)
    expected, expected_last = recurrent(x, state)
    rng = np.random.default_rng(0)
    d_o, d_last = rng.normal(size=expected.shape), rng.normal(size=state.shape)
    given = [jnp.asarray(a, dtype="float32") for a in (state, d_o, d_last)]

    def run(x, state, d_o, d_last):
        return form.forward(x, state), form.vjp(x, state, d_o, d_last)

    with small_tiles(**TILES):
        (out, last), d = quick(run)(float32(x), *given)
    assert_close(out, expected, 1e-5)
    assert_close(last, expected_last, 1e-5)
    expected = recurrent_vjp(x, state, d_o, d_last)
    assert_close(d.state, expected.state, 1e-5)
    for result, exact in zip(d.stream, expected.stream, strict=True):
        if exact is not None:
            assert_close(result, exact, 1e-5)
