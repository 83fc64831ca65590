"""Shorthands: which option an array switches on follows from the mechanism's declaration."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

import precondattn as pa
from precondattn.algebra.options import choice, flag
from precondattn.execution.build import build, switches_of

RNG = np.random.default_rng(0)
Q, K, V = RNG.normal(size=(3, 1, 5, 2, 4))


@pytest.mark.parametrize(
    ("cls", "name", "shape", "expected"),
    [
        (pa.Softmax, "bias", (1, 1, 5, 5), "softmax[bias=true]"),
        (pa.Lucid, "bias", (1, 1, 5, 5), "lucid(softmax[bias=true])"),
        (pa.Lucid, "lucid_beta", (1, 5, 2), "lucid[beta=true]"),
        (pa.QKNorm, "q_gain", (4,), "qk_norm[gain=true]"),
        (pa.QKNorm, "k_gain", (4,), "qk_norm[gain=true]"),
        (pa.Differential, "lam", (), "differential"),
        (pa.Differential, "lam", (2,), "differential[per=head]"),
        (pa.Differential, "lam", (1, 5, 2), "differential[per=token]"),
        (pa.Temperature, "tau", (), "temperature"),
        (pa.Temperature, "tau", (2,), "temperature[per=head]"),
        (pa.Hedgehog, "q_weight", (4, 4), "hedgehog"),
        (pa.Hedgehog, "q_weight", (2, 4, 4), "hedgehog[per=head]"),
        # The shape is wrong: the input is accepted by name, and then its shape is refused.
        (pa.Lucid, "lucid_beta", (5, 2), "lucid[beta=true]"),
    ],
)
def test_an_array_switches_its_option_on(cls, name, shape, expected):
    array = np.ones(shape)
    mechanism, rest = build(cls, {name: array})
    assert str(mechanism) == expected
    assert rest == {name: array} or rest[name] is array


def test_an_option_that_is_passed_is_not_changed():
    mechanism, _ = build(pa.Differential, {"lam": np.ones(2), "per": "token"})
    assert mechanism.per == "token"
    mechanism, rest = build(pa.CCQ, {"tau": np.float64(0.5), "covariance": "query_weighted"})
    assert mechanism.tau == 0.5
    assert not rest


def test_an_input_of_two_option_settings_needs_an_explicit_option():
    with pytest.raises(TypeError, match=r"it belongs to forget='unscaled' or forget='scaled'"):
        pa.softmax(Q, K, V, g=np.zeros((1, 5, 2)))


def test_the_shorthand_of_a_third_party_mechanism_follows_its_declaration():
    @dataclass(frozen=True)
    class Reweighted(pa.TokenWise):
        """v, or w v with an input `weight`, one for each token or for each token and head."""

        name: ClassVar[str] = "reweighted"
        weighted: bool = flag(False)
        per: str = choice("token", "head")
        output = "b s n e"

        @property
        def inputs(self):
            patterns = {"token": "b s", "head": "b s n"}
            weight = {"weight": patterns[self.per]} if self.weighted else {}
            return pa.Inputs(v="b s n e", **weight)

        def forward(self, x, frame):
            if not self.weighted:
                return x["v"], ()
            missing = x["v"].ndim - x["weight"].ndim
            return x["v"] * x["weight"].reshape(*x["weight"].shape, *(1,) * missing), ()

    try:
        reweighted = pa.shorthand(Reweighted)
        assert reweighted.__name__ == "reweighted"
        assert "weighted, per" in reweighted.__doc__
        assert np.array_equal(reweighted(V), V)
        assert np.array_equal(reweighted(V, weight=np.full((1, 5), 2.0)), 2 * V)
        twice = reweighted(V, weight=np.full((1, 5, 2), 2.0), per="head")
        assert np.array_equal(twice, 2 * V)
        with pytest.raises(TypeError, match="did you mean 'weighted'"):
            reweighted(V, weigthed=True)
    finally:
        pa.unregister_mechanism("reweighted")


def test_every_mechanism_that_can_be_named_has_a_shorthand_of_its_name():
    for name, cls in pa.mechanisms().items():
        if cls.__module__.startswith("precondattn."):
            assert getattr(pa, name).__name__ == name
            assert getattr(pa, cls.__name__) is cls
            assert switches_of(cls) is switches_of(cls)  # Derived once.
