"""Axis letters of pieces are matched across a composition; contradictions are refused."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

import precondattn as pa
from precondattn.algebra import registry
from precondattn.algebra.declaration import Inputs
from precondattn_conformance.inputs import CallLayout, make_inputs


@pytest.fixture
def toys():
    """Leaves and preconditioners that are unregistered after the test."""
    before = set(registry.registered())

    def leaf(name, inputs, output, forward):
        members = {
            "name": name,
            "inputs": Inputs(**inputs),
            "output": output,
            "forward": lambda self, x, frame: (forward(**x), ()),
            "__annotations__": {"name": ClassVar[str]},
        }
        return dataclass(frozen=True)(type(name, (pa.TokenWise,), members))()

    def around(name, steps):
        members = {
            "name": name,
            "base": pa.Softmax(),
            "steps": lambda self: tuple(steps(self.base)),
            "__annotations__": {"name": ClassVar[str], "base": pa.Mechanism},
        }
        return dataclass(frozen=True)(type(name, (pa.Preconditioner,), members))

    yield leaf, around
    for name in set(registry.registered()) - before:
        registry.unregister(name)


def low_rank(toys):
    """Queries, keys and values pass through bottlenecks; each calls its own width m."""
    leaf, around = toys
    declared = {"x": "b t h d", "down": "d m", "up": "m d"}
    project = leaf("toy_project", declared, "b t h d", lambda x, down, up: x @ down @ up)
    return around(
        "toy_low_rank",
        lambda base: [
            *(
                pa.step(f"{n}_low", project, x=n, down=f"{n}_down", up=f"{n}_up")
                for n in ("q", "k", "v")
            ),
            pa.step("out", base, q="q_low", k="k_low", v="v_low"),
        ],
    )


@pytest.mark.parametrize("base", ["softmax", "ssd", "gsa", "gated_delta", "ccq(gla)"])
def test_a_letter_of_three_steps_becomes_three_letters_without_a_rule(toys, base):
    """Value heads must be multiples of key heads; ranks, here 3, 5 and 7, need not."""
    m, inner = low_rank(toys)(base=pa.parse(base)), pa.parse(base)
    x = make_inputs(inner, CallLayout("test", t=5, s=5, h=2, n=1, d=4, e=6), "random")
    rng = np.random.default_rng(0)
    for name, width, rank in (("q", 4, 3), ("k", 4, 5), ("v", 6, 7)):
        x[f"{name}_down"], x[f"{name}_up"] = (
            rng.normal(size=(width, rank)),
            rng.normal(size=(rank, width)),
        )
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
    doubled = around(
        "toy_doubled",
        lambda base: [
            pa.step("q2x", double, x="q"),
            pa.step("k2x", double, x="k"),
            pa.step("out", base, q="q2x", k="k2x"),
        ],
    )
    m = doubled(base=doubled(base=pa.GLA()))
    assert m.inputs["g"].text == "b s n 4*d in (-inf, 0]"
    assert m.inputs["q"].text == "b t h d"
    assert pa.RowNormalized(m).program.output.text == "b t h e"


def test_an_input_of_two_widths_is_refused_at_construction(toys):
    leaf, around = toys
    two = leaf("toy_two", {"a": "b t h d", "c": "b t h d"}, "b t h d", lambda a, c: a + c)
    with pytest.raises(TypeError, match=r"q.* can not be both what .* declares"):
        around(
            "toy_contradiction",
            lambda base: [
                pa.step("q_map", pa.HedgehogMap(), x="q"),
                pa.step("q3", two, a="q", c="q_map"),
                pa.step("out", base, q="q3"),
            ],
        )()


def test_an_input_with_two_numbers_of_axes_is_refused_at_construction(toys):
    leaf, around = toys
    scaled = leaf("toy_scaled", {"x": "b t h d", "g": "b t h"}, "b t h d", lambda x, g: x)
    made = around(
        "toy_ranks",
        lambda base: [pa.step("q_scaled", scaled, x="q"), pa.step("out", base, q="q_scaled")],
    )
    with pytest.raises(TypeError, match=r"g can not be both what .*gla.* toy_scaled declares"):
        made(base=pa.GLA())


def test_a_fixed_width_of_a_piece_holds_for_the_whole_mechanism(toys):
    leaf, around = toys
    fixed = leaf("toy_fixed", {"x": "b t h 64"}, "b t h 64", lambda x: x)
    m = around(
        "toy_sixty_four",
        lambda base: [pa.step("q_fixed", fixed, x="q"), pa.step("out", base, q="q_fixed")],
    )()
    assert m.inputs["k"].text == "b s n 64"
    q, k, v = (np.ones((1, 2, 1, width)) for width in (64, 32, 5))
    for verb in (m, lambda *x: m.init_cache(*x, capacity=4)):
        with pytest.raises(pa.ShapeError, match=r"k is declared .* is 32, but 64 is needed"):
            verb(q, k, v)


@pytest.mark.parametrize("name", ["k2", "q2"])
def test_inputs_of_a_second_map_must_have_the_calls_dtype(name):
    torch = pytest.importorskip("torch")
    m = pa.Differential(pa.Delta())
    x = make_inputs(m, CallLayout("test", t=3, s=3), "random")
    tensors = {n: torch.tensor(a, dtype=torch.bfloat16) for n, a in x.items()}
    m(**tensors | {"beta": tensors["beta"].float()})
    with pytest.raises(TypeError, match="inputs of one dtype expected"):
        m(**tensors | {name: tensors[name].float()})
