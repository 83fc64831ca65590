"""Which recipe makes which input; no framework is needed."""

from dataclasses import dataclass
from typing import ClassVar

import pytest

import precondattn as pa
from precondattn.layers import recipes
from precondattn.layers.plan import plan_for
from precondattn.layers.recipes import (
    Convolution,
    LogSigmoid,
    Projection,
    Rotary,
    Sigmoid,
    StepSize,
    UnitConvolution,
)
from precondattn.layers.sizes import LayerSizes
from tests.layers.layer_cases import MECHANISMS, sizes_for


def plan(expression, width=24, heads=4, recipes=None, **sizes):
    return plan_for(expression, LayerSizes(width, heads, **sizes), recipes)


def recipes_of(expression, **options):
    return {entry.name: entry.recipe for entry in plan(expression, **options).entries}


@pytest.mark.parametrize("expression", MECHANISMS)
def test_every_input_of_every_mechanism_has_a_recipe_with_an_equation(expression):
    made = plan(expression, **sizes_for(expression))
    names = [entry.name for entry in made.entries]
    assert set(made.mechanism.inputs) < set(names)
    assert names[-1] == "out"
    for entry in made.entries:
        assert entry.recipe.equation, entry
        assert "`" not in entry.recipe.equation, entry
        assert "\\" not in entry.recipe.printed, entry
    assert hash(made) == hash(plan(pa.parse(expression), **sizes_for(expression)))
    assert made == plan(pa.parse(expression), **sizes_for(expression))


STEPS = {"v": Projection(), "g": LogSigmoid()}


@pytest.mark.parametrize(
    ("expression", "given", "name", "recipe"),
    [
        ("ccq(gated_delta)", {}, "k", UnitConvolution()),
        ("hedgehog(gla)", {}, "k", Projection()),
        ("lucid(qk_norm)", {}, "k", Rotary()),
        ("lucid(path)", {}, "beta", Sigmoid(2.0, bias=True)),
        ("delta", {}, "beta", Sigmoid()),
        ("gated_delta", {"beta": Sigmoid(2.0), "q": Convolution(3)}, "q", Convolution(3)),
        ("gated_delta", {"beta": Sigmoid(2.0), "q": Convolution(3)}, "k", UnitConvolution()),
        ("softmax[bias=true]", {"bias": recipes.Learned(0.0)}, "bias", recipes.Learned(0.0)),
        # The output is that of the outermost piece that has one.
        ("row_normalized(gsa)", {}, "out", "Activated"),
        ("differential(gla)", {}, "out", "DifferenceNorm"),
        ("lucid(laser)", {}, "out", "Unchanged"),
        # A helper that no recipe reads has no weights.
        ("ssd", {}, "dt", "StepSize"),
        ("ssd", STEPS, "dt", None),
        ("ssd", {**STEPS, "dt": StepSize()}, "dt", "StepSize"),
    ],
)
def test_the_recipe_of_an_input(expression, given, name, recipe):
    found = recipes_of(expression, recipes=given).get(name)
    assert (type(found).__name__ if isinstance(recipe, str) else found) == recipe


def test_the_second_map_of_ccq_reads_its_own_query():
    made = plan("differential[paired=q/k/contraction](ccq)")
    reads = {entry.name: entry.reads for entry in made.entries}
    assert reads["contraction"] == (("q", "q"),)
    assert reads["contraction2"] == (("q", "q2"),)


@pytest.mark.parametrize(
    ("expression", "options", "error", "message"),
    [
        ("sofmax", {}, ValueError, "sofmax"),
        (3, {}, TypeError, "mechanism must be a text or a mechanism; found 3"),
        ("softmax", {"heads": 0}, ValueError, "heads must be 1 or above; found 0"),
        ("softmax", {"heads": 2.0}, TypeError, "heads must be a whole number; found 2.0"),
        ("softmax", {"heads": 5}, ValueError, "5 query heads must divide the width 24"),
        ("softmax", {"kv_heads": 3}, ValueError, "kv_heads must divide heads; found kv_heads=3"),
        ("delta", {"kv_heads": 2}, ValueError, "as many key heads as query heads, 4; found 2"),
        ("delta", {"value_heads": 6}, ValueError, "heads must divide value_heads"),
        ("gla", {"value_heads": 8}, ValueError, "gla has no value heads of its own; found 8"),
        ("cross_covariance", {"value_dim": 5}, ValueError, "values as wide as keys, 6; found 5"),
        ("gla", {"slots": 8}, ValueError, "slots: gla has none; found 8"),
        ("softmax[bias=true]", {}, TypeError, "has none for bias"),
        ("softmax", {"recipes": {"beta": Sigmoid()}}, ValueError, "has no input 'beta'; it has q"),
        ("softmax", {"recipes": {"q": "rotary"}}, TypeError, "that of q must be a Recipe"),
    ],
)
def test_bad_input_is_named(expression, options, error, message):
    with pytest.raises(error, match=message):
        plan(expression, **options)


@pytest.fixture
def own():
    @dataclass(frozen=True)
    class Own(pa.Delta):
        name: ClassVar[str] = "own"

        @property
        def inputs(self):
            of_heads = {"tau": "h in (0, inf)", "leak": "h in (-inf, 0]"}
            return pa.Inputs(**super().inputs, **of_heads, mix="b t h in [0, 3]")

    yield Own()
    pa.unregister_mechanism("own")


def test_inputs_without_recipes_are_named_together_with_their_ranges(own):
    with pytest.raises(TypeError, match=r"has none for q \(b t h d\), .*tau \(h in \(0, inf\)"):
        plan(own)
