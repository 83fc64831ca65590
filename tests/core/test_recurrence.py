"""A leaf declares its recurrence; a subclass with mathematics of its own has none."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

import precondattn as pa
from precondattn.algebra import registry


@dataclass(frozen=True)
class RenamedDelta(pa.GatedDelta):
    name: ClassVar[str] = "renamed_delta"
    scale: float | None = 1.0


@dataclass(frozen=True)
class SlowerDelta(pa.GatedDelta):
    name: ClassVar[str] = "slower_delta"

    def log_decay(self, x, frame):
        return super().log_decay(x, frame) / 2


@dataclass(frozen=True)
class RenamedSlowerDelta(SlowerDelta):
    name: ClassVar[str] = "renamed_slower_delta"


@dataclass(frozen=True)
class OtherRun(pa.Stateful):
    """As a third-party leaf: nothing is known of its recurrence."""

    name: ClassVar[str] = "other_run"
    inputs = pa.Inputs(v="b s n e")
    output = "b s n e"


@dataclass(frozen=True)
class SpelledDelta(pa.LinearFamily):
    """A recurrence that exists, under another name."""

    name: ClassVar[str] = "spelled_delta"
    declares = pa.Recurrence("delta", gate="head", strength="scalar", heads="u")


@dataclass(frozen=True)
class OlderDelta(pa.LinearFamily):
    """As it was spelled before declarations."""

    name: ClassVar[str] = "older_delta"
    heads: ClassVar[str] = "u"
    gate: ClassVar[str | None] = "head"
    is_delta: ClassVar[bool] = True


@pytest.fixture(scope="module", autouse=True)
def registered():
    yield
    for each in (RenamedDelta, SlowerDelta, RenamedSlowerDelta, OtherRun, SpelledDelta, OlderDelta):
        registry.unregister(each.name)


@pytest.mark.parametrize("leaf", [RenamedDelta(), SpelledDelta(), OlderDelta()])
def test_a_leaf_that_spells_a_recurrence_has_it(leaf):
    assert leaf.recurrence == pa.GatedDelta().recurrence


@pytest.mark.parametrize("leaf", [SlowerDelta(), RenamedSlowerDelta(), OtherRun(), pa.Softmax()])
def test_a_leaf_with_mathematics_of_its_own_has_no_recurrence(leaf):
    assert leaf.recurrence is None


MATHEMATICS = ("zero_state", "run", "run_vjp", "forward", "backward", "step", "step_backward")
MATHEMATICS += ("inputs", "slots", "stream", "gradients", "log_decay", "scale_for", "erased_vjp")


@pytest.mark.parametrize("name", MATHEMATICS)
def test_a_leaf_that_overrides_a_method_has_no_recurrence(name):
    changed = type("Changed", (pa.GatedDelta,), {name: getattr(pa.LinearFamily, name)})
    assert changed().recurrence is None


def test_inputs_output_and_gradient_are_those_of_the_declaration():
    rng = np.random.default_rng(0)
    x = {
        n: rng.normal(size=p.shape({"b": 2, "t": 9, "s": 9, "h": 2, "u": 4, "d": 5, "e": 3}))
        for n, p in pa.GatedDelta().inputs.items()
    }
    x["g"], x["beta"] = -abs(x["g"]), abs(x["beta"]) / 9
    expected, pull = pa.GatedDelta().vjp(**x, backend="reference")
    out, mine = SpelledDelta().vjp(**x, backend="reference")
    assert np.array_equal(out, expected)
    gradients = pull(np.cos(out))
    assert all(np.array_equal(d, gradients[n]) for n, d in mine(np.cos(out)).items())
