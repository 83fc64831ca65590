"""A step that reads a missing buffer gets an error with the names that exist."""

import re

import numpy as np
import pytest

import precondattn as pa


class MisspeltRunner(pa.Runner):
    """A runner that takes the leaf's names of slots for those of the cache's buffers."""

    def step(self, past, inputs, frame):
        return past["key"], {}


class Misspelt(pa.Backend):
    name = "misspelt"

    def prepare(self, piece, request):
        return MisspeltRunner()


@pytest.fixture
def leaf(only_the_reference):
    class Misread(pa.Linear):
        name = "misread"

        def run(self, state, x, frame, form=pa.RECURRENT):
            return super().run({"state": state["S"]}, x, frame, form)

    yield Misread()
    pa.unregister_mechanism("misread")


def notes_of(mechanism, inputs, backend):
    cache = mechanism.init_cache(**inputs, capacity=8)
    with pytest.raises(KeyError) as raised:
        mechanism.extend(cache, **inputs, backend=backend)
    return raised.value.__notes__


def inputs_of(names):
    return dict(zip(names, np.random.default_rng(0).normal(size=(3, 1, 2, 3, 4)), strict=False))


def test_of_a_backend(only_the_reference):
    pa.register_backend(Misspelt)
    (note,) = notes_of(pa.LucidSolve(), inputs_of("kv"), "misspelt")
    assert note == "no 'key' in past, which has 'k', 'out', 'rms(k)', nor in the inputs: 'k', 'v'"


def test_of_a_leaf_of_ones_own(leaf):
    (note,) = notes_of(leaf, inputs_of("qkv"), "reference")
    assert re.fullmatch("no 'S' in past, which has 'state', nor in the inputs: 'q', 'k', 'v'", note)
