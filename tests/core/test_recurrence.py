"""A leaf declares its recurrence; a subclass with mathematics of its own has none."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

import precondattn as pa
from precondattn.algebra import registry
from precondattn.algebra.recurrences import Recurrences, entry_of, lack_of
from precondattn.dispatch.discovery import discover
from precondattn_conformance.bench.computation import entry_for


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


# Tests of other files have all registered mechanisms.
for each in (RenamedDelta, SlowerDelta, RenamedSlowerDelta, OtherRun, SpelledDelta):
    registry.unregister(each.name)


@pytest.mark.parametrize("leaf", [RenamedDelta(), SpelledDelta()])
def test_a_leaf_that_spells_a_recurrence_has_it(leaf):
    assert leaf.recurrence == pa.GatedDelta().recurrence


@pytest.mark.parametrize("leaf", [SlowerDelta(), RenamedSlowerDelta(), OtherRun(), pa.Softmax()])
def test_a_leaf_with_mathematics_of_its_own_has_no_recurrence(leaf):
    assert leaf.recurrence is None


def test_a_leaf_that_overrides_a_method_has_no_recurrence():
    for name in (
        *("zero_state", "run", "run_vjp", "forward", "backward", "step", "step_backward"),
        *("inputs", "slots", "stream", "gradients", "log_decay", "scale_for", "erased_vjp"),
    ):
        changed = type("Changed", (pa.GatedDelta,), {name: getattr(pa.LinearFamily, name)})
        assert changed().recurrence is None, name


@pytest.mark.parametrize("backend", sorted(b.name for b in discover().backends))
def test_a_backend_that_computes_a_recurrence_computes_it_by_any_name(backend):
    backend = next(b for b in discover().backends if b.name == backend)
    shapes = (("q", (2, 8, 2, 16)), ("k", (2, 8, 2, 16)), ("v", (2, 8, 2, 16)))
    shapes += (("g", (2, 8, 2)), ("beta", (2, 8, 2)))
    for library in backend.libraries:
        if library in ("torch", "jax"):
            pytest.importorskip(library)
        for device in ("cpu", "cuda"):
            request = pa.Request("vjp", library, device, "float32", shapes, frozenset())
            answers = [
                isinstance(backend.prepare(leaf, request), str)
                for leaf in (pa.GatedDelta(), SpelledDelta())
            ]
            assert answers[0] == answers[1], (library, device)


def test_a_backend_names_what_it_does_not_compute():
    decayed = Recurrences(("delta",), gate=(None, "head"), strength=("scalar",))
    table = {decayed: "an algorithm", pa.GSA: "another"}
    assert entry_of(table, pa.Delta()) == entry_of(table, SpelledDelta()) == "an algorithm"
    assert entry_of(table, pa.GSA()) == "another"
    assert entry_of(table, SlowerDelta()) is None
    for leaf, reason in (
        (SlowerDelta(), ""),
        (pa.KDA(), ": rule='delta' is not computed with gate='channel'"),
        (pa.DeltaProduct(steps=1), ": rule='delta' is not computed with steps=1"),
        (pa.GLA(), ": rule='add' is not computed"),
        (pa.DPLR(), ": rule='low rank' is not computed"),
    ):
        assert entry_of(table, leaf) is None
        assert lack_of(table, leaf) == reason


def test_what_is_compared_with_a_recurrence_is_compared_with_it_by_any_name():
    table = {"gated_delta": "a peer", "atk": "another"}
    assert entry_for(table, SpelledDelta()) == entry_for(table, pa.GatedDelta()) == "a peer"
    assert entry_for(table, pa.ATK()) == "another"
    for other in (RenamedDelta(), SlowerDelta(), pa.KDA(), pa.ATK(SpelledDelta())):
        assert entry_for(table, other) is None


def test_inputs_output_and_gradient_are_those_of_the_declaration():
    rng = np.random.default_rng(0)
    x = {
        n: rng.normal(size=p.shape({"b": 2, "t": 9, "s": 9, "h": 2, "u": 4, "d": 5, "e": 3}))
        for n, p in pa.GatedDelta().inputs.items()
    }
    x["g"], x["beta"] = -abs(x["g"]), abs(x["beta"]) / 9
    expected, pull = pa.GatedDelta().vjp(**x)
    out, mine = SpelledDelta().vjp(**x)
    assert np.array_equal(out, expected)
    gradients = pull(np.cos(out))
    assert all(np.array_equal(d, gradients[n]) for n, d in mine(np.cos(out)).items())
