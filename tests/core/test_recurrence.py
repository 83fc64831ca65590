"""A leaf declares its recurrence, and the letters of its axes, which a composition matches."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

import precondattn as pa
from precondattn.algebra import registry
from precondattn.algebra.declaration import Inputs
from precondattn.algebra.recurrences import Recurrences, entry_of, lack_of
from precondattn.dispatch.discovery import discover
from tests.core.inputs import inputs_of


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
for each in (RenamedDelta, SlowerDelta, OtherRun, SpelledDelta):
    registry.unregister(each.name)


def test_a_leaf_that_spells_a_recurrence_has_it_and_one_with_its_own_mathematics_has_none():
    for leaf in (RenamedDelta(), SpelledDelta()):
        assert leaf.recurrence == pa.GatedDelta().recurrence
    x = inputs_of("gated_delta", t=9, d=5, e=3)
    (expected, pull), (out, mine) = pa.GatedDelta().vjp(**x), SpelledDelta().vjp(**x)
    assert np.array_equal(out, expected)
    gradients = pull(np.cos(out))
    assert all(np.array_equal(d, gradients[n]) for n, d in mine(np.cos(out)).items())
    renamed = type("Renamed", (SlowerDelta,), {})
    for leaf in (SlowerDelta(), renamed(), OtherRun(), pa.Softmax()):
        assert leaf.recurrence is None


def test_a_leaf_that_overrides_a_method_has_no_recurrence():
    for name in (
        *("zero_state", "run", "run_vjp", "forward", "backward", "step", "step_backward"),
        *("inputs", "slots", "stream", "gradients", "log_decay", "scale_for", "erased_vjp"),
    ):
        changed = type("Changed", (pa.GatedDelta,), {name: getattr(pa.LinearFamily, name)})
        assert changed().recurrence is None, name


@pytest.mark.parametrize("backend", discover().backends, ids=lambda backend: backend.name)
def test_a_backend_that_computes_a_recurrence_computes_it_by_any_name(backend):
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


@pytest.fixture
def toys(unregistered):
    """Functions that define leaves and preconditioners."""

    def leaf(name, inputs, output, forward):
        members = {"name": name, "inputs": Inputs(**inputs), "output": output}
        members["forward"] = lambda self, x, frame: (forward(**x), ())
        members["__annotations__"] = {"name": ClassVar[str]}
        return dataclass(frozen=True)(type(name, (pa.TokenWise,), members))()

    def around(name, steps):
        members = {"name": name, "base": pa.Softmax()}
        members["steps"] = lambda self: tuple(steps(self.base))
        members["__annotations__"] = {"name": ClassVar[str], "base": pa.Mechanism}
        return dataclass(frozen=True)(type(name, (pa.Preconditioner,), members))

    return leaf, around


@pytest.mark.parametrize("base", ["softmax", "ssd", "ccq(gla)"])
def test_a_letter_of_three_steps_becomes_three_letters_without_a_rule(toys, base):
    """Queries, keys and values pass through bottlenecks of their own widths, 3, 5 and 7."""
    leaf, around = toys
    declared = {"x": "b t h d", "down": "d m", "up": "m d"}
    project = leaf("toy_project", declared, "b t h d", lambda x, down, up: x @ down @ up)
    low = [
        pa.step(f"{n}_low", project, x=n, down=f"{n}_down", up=f"{n}_up") for n in ("q", "k", "v")
    ]
    last = {"q": "q_low", "k": "k_low", "v": "v_low"}
    low_rank = around("toy_low_rank", lambda base: [*low, pa.step("out", base, **last)])
    m, inner = low_rank(base=pa.parse(base)), pa.parse(base)
    x = inputs_of(inner, t=5, h=2, n=1, d=4, e=6)
    rng = np.random.default_rng(0)
    for name, width, rank in (("q", 4, 3), ("k", 4, 5), ("v", 6, 7)):
        x[f"{name}_down"] = rng.normal(size=(width, rank))
        x[f"{name}_up"] = rng.normal(size=(rank, width))
    mapped = {n: x[n] @ x[f"{n}_down"] @ x[f"{n}_up"] for n in ("q", "k", "v")}
    expected = inner(**{**{n: x[n] for n in inner.inputs}, **mapped})
    np.testing.assert_allclose(m(**x), expected, rtol=1e-9, atol=1e-9)
    out, _ = m.extend(m.init_cache(**x, capacity=8), **x)
    np.testing.assert_allclose(out, expected, rtol=1e-9, atol=1e-9)
    x["k_up"] = x["k_up"][:4]
    with pytest.raises(pa.ShapeError, match=r"k_up is declared .* is 4, but 5 in k_down"):
        m(**x)


def test_a_width_doubled_twice_is_four_times_as_wide_for_the_base(toys):
    leaf, around = toys
    double = leaf("toy_double", {"x": "b t h d"}, "b t h 2*d", lambda x: np.concat([x, x], axis=-1))
    first = [pa.step("q2x", double, x="q"), pa.step("k2x", double, x="k")]
    last = {"q": "q2x", "k": "k2x"}
    doubled = around("toy_doubled", lambda base: [*first, pa.step("out", base, **last)])
    m = doubled(base=doubled(base=pa.GLA()))
    assert m.inputs["g"].text == "b s n 4*d in (-inf, 0]"
    assert m.inputs["q"].text == "b t h d"
    assert pa.RowNormalized(m).program.output.text == "b t h e"


def test_an_input_of_two_widths_or_two_numbers_of_axes_is_refused_at_construction(toys):
    leaf, around = toys
    two = leaf("toy_two", {"a": "b t h d", "c": "b t h d"}, "b t h d", lambda a, c: a + c)
    gated = leaf("toy_gated", {"x": "b t h d", "g": "b t h"}, "b t h d", lambda x, g: x)
    widths = pa.step("q_map", pa.HedgehogMap(), x="q"), pa.step("q3", two, a="q", c="q_map")
    for base, steps, words in (
        (pa.Softmax(), widths, r"q.* can not be both what .* declares"),
        (pa.GLA(), (pa.step("q3", gated, x="q"),), r"g .* both what .*gla.* toy_gated declares"),
    ):
        made = around("toy_bad", lambda base, steps=steps: [*steps, pa.step("out", base, q="q3")])
        with pytest.raises(TypeError, match=words):
            made(base=base)
        registry.unregister("toy_bad")


def test_a_fixed_width_of_a_piece_holds_for_the_whole_mechanism(toys):
    leaf, around = toys
    fixed = leaf("toy_fixed", {"x": "b t h 64"}, "b t h 64", lambda x: x)
    first = pa.step("q_fixed", fixed, x="q")
    m = around("toy_sixty_four", lambda base: [first, pa.step("out", base, q="q_fixed")])()
    assert m.inputs["k"].text == "b s n 64"
    q, k, v = (np.ones((1, 2, 1, width)) for width in (64, 32, 5))
    for verb in (m, lambda *x: m.init_cache(*x, capacity=4)):
        with pytest.raises(pa.ShapeError, match=r"k is declared .* is 32, but 64 is needed"):
            verb(q, k, v)
