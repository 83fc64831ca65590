"""Mechanisms made of steps: names that clash are refused, and each result is computed once."""

import re
from dataclasses import dataclass

import numpy as np
import pytest

import precondattn as pa
from precondattn.algebra import registry
from precondattn.algebra.declaration import Inputs


@pytest.fixture
def toy():
    """Mechanisms with names that no real one has; they are unregistered after the test."""
    before = registry.registered()
    yield
    for name in set(registry.registered()) - set(before):
        registry.unregister(name)
    assert registry.registered() == before


class _Pointwise(pa.TokenWise):
    """The base class of toy pieces; it has no name and is therefore not registered."""

    output = "b t h d"

    def forward(self, x, frame):
        return self.function(*x.values()), ()

    def backward(self, x, frame, out, residuals, cotangent):
        raise NotImplementedError


def leaf(name, function, *inputs):
    """A toy piece: a function of arrays (b, t, h, d)."""
    declared = {"inputs": Inputs(**dict.fromkeys(inputs, "b t h d"))}
    members = {"name": name, "function": staticmethod(function), **declared}
    return dataclass(frozen=True)(type(name, (_Pointwise,), members))()


def difference_leaf():
    return leaf("toy_difference", np.subtract, "left", "right")


def scaling_leaf(name):
    return leaf(name, np.multiply, "x", "strength")


def wiring(name, make_steps):
    """A preconditioner whose steps are `make_steps(base)`."""

    @dataclass(frozen=True)
    class Wired(pa.Preconditioner):
        base: pa.Mechanism = pa.Softmax()

        def steps(self):
            return tuple(make_steps(self.base))

    Wired.__name__ = Wired.__qualname__ = name
    return dataclass(frozen=True)(type(name, (Wired,), {"name": name}))


def one(base):
    return [pa.step("a", scaling_leaf("toy_weak"), x="q"), pa.step("out", base, q="a")]


def inner_and_outer():
    inner = wiring("toy_inner", one)
    strong = scaling_leaf("toy_strong")
    outer = [pa.step("a", strong, x="q"), pa.step("out", inner(), q="a")]
    return wiring("toy_outer", lambda base: outer)(inner())


def made_of(*steps):
    """A toy of these steps around a base, and the last step, which is the base."""
    *before, last = steps
    return wiring(
        "toy", lambda base: [*(pa.step(*a, **x) for *a, x in before), pa.step("out", base, **last)]
    )()


TWO = "the input 'strength' would mean two things"
RMS = pa.RMSNorm()
CLASHES = [
    (
        lambda: made_of(
            ("a", scaling_leaf("toy_strong"), {"x": "q"}),
            ("b", scaling_leaf("toy_weak"), {"x": "a"}),
            {"q": "b"},
        ),
        f"toy(softmax): {TWO}, that of toy_strong and that of toy_weak",
    ),
    (inner_and_outer, f"toy_outer(toy_inner): {TWO}"),
    (lambda: made_of({"q": "k"}), "q would be renamed to k, which softmax declares already"),
    (
        lambda: (pair := paired(q="q2"))(pair()),
        "toy_pair(toy_pair): q would be renamed to q2, which toy_pair declares already",
    ),
    (lambda: made_of(("k", RMS, {"x": "k"}), {}), "toy: 'k' is both a step and an input"),
    (
        lambda: made_of(("a", RMS, {"x": "q"}), ("a", pa.RMSNorm(0.5), {"x": "a"}), {"q": "a"}),
        "toy: two steps are named 'a'",
    ),
    (
        lambda: made_of(("q_unit", RMS, {"x": "q"}), {"query": "q_unit"}),
        "toy(softmax) makes no sense: it changes query, and softmax takes q, k, v",
    ),
]


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize(("build", "message"), CLASHES)
def test_names_that_would_mean_two_things_are_refused_at_construction(build, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        build()


@pytest.mark.usefixtures("toy")
def test_a_taken_and_an_unknown_name_are_refused_and_one_meaning_serves_two_steps():
    strong = scaling_leaf("toy_strong")
    twice = made_of(("a", strong, {"x": "q"}), ("b", strong, {"x": "a"}), {"q": "b"})
    assert list(twice.inputs) == ["q", "k", "v", "strength"]
    with pytest.raises(ValueError, match=r"the name 'softmax' is taken by precondattn\.spec"):
        wiring("softmax", lambda base: [pa.step("out", base)])
    with pytest.raises(ValueError, match="there is no mechanism 'toy_none'; known are atk, b"):
        registry.unregister("toy_none")


def paired(**second):
    """A toy that subtracts from a call of its base another one with changed inputs."""
    difference = difference_leaf()
    return wiring(
        "toy_pair",
        lambda base: [
            pa.step("first", base),
            pa.step("second", base, **second),
            pa.step("out", difference, left="first", right="second"),
        ],
    )


@pytest.mark.usefixtures("toy")
def test_a_leaf_called_twice_on_the_same_inputs_is_called_once_and_may_be_read_twice():
    nothing = paired()()
    assert str(nothing.program) == (
        "first = softmax(q, k, v); out = toy_difference(left=first, right=first)"
    )
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 5, 2, 3))
    np.testing.assert_array_equal(nothing(q, k, v), np.zeros_like(q))


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize(
    ("base", "kept"),
    [("laser", ["k", "v"]), ("lucid", ["first.y", "k", "rms(k)"])],
)
def test_an_array_is_stored_once_in_the_cache_however_many_calls_read_it(base, kept):
    mechanism = paired(q="q2")(pa.parse(base))
    q, k, v, q2 = np.random.default_rng(0).normal(size=(4, 2, 6, 2, 3))
    cache = mechanism.init_cache(q, k, v, capacity=8)
    assert sorted(cache.store) == kept
    parts = []
    for a, b in ((0, 1), (1, 4), (4, 6)):
        new = (array[:, a:b] for array in (q, k, v))
        out, cache = mechanism.extend(cache, *new, q2=q2[:, a:b])
        parts.append(out)
    whole = mechanism(q, k, v, q2=q2)
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, rtol=1e-12, atol=1e-12)
    expected = pa.parse(base)(q, k, v) - pa.parse(base)(q2, k, v)
    np.testing.assert_allclose(whole, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("toy")
def test_a_toy_is_an_expression_as_long_as_it_is_registered():
    pair = paired(q="q2")
    assert str(pair(pa.Lucid(eps=0))) == "toy_pair(lucid[eps=0])"
    assert pa.parse("toy_pair(lucid[eps=0])") == pair(pa.Lucid(eps=0))
    registry.unregister("toy_pair")
    with pytest.raises(ValueError, match="unknown mechanism 'toy_pair'"):
        pa.parse("toy_pair")
