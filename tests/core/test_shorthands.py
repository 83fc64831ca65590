"""Shorthands: which option an array switches on follows from the mechanism's declaration."""

import inspect
import pydoc
import subprocess
import sys
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

import precondattn as pa
from precondattn.algebra.options import choice, flag
from precondattn.execution.input_names import CALL_OPTIONS
from precondattn.execution.shorthand import build, options_of, switches_of

RNG = np.random.default_rng(0)
Q, K, V = RNG.normal(size=(3, 1, 5, 2, 4))


def test_an_array_switches_its_option_on():
    for cls, name, shape, expected in (
        (pa.Lucid, "bias", (1, 1, 5, 5), "lucid(softmax[bias=true])"),
        (pa.Lucid, "lucid_beta", (1, 5, 2), "lucid[beta=true]"),
        (pa.QKNorm, "q_gain", (4,), "qk_norm[gain=true]"),
        (pa.Temperature, "tau", (), "temperature"),
        (pa.Temperature, "tau", (2,), "temperature[per=head]"),
        (pa.Differential, "lam", (), "differential"),
        (pa.Differential, "lam", (2,), "differential[per=head]"),
        (pa.Differential, "lam", (1, 5, 2), "differential[per=token]"),
        (pa.Hedgehog, "q_weight", (4, 4), "hedgehog"),
        (pa.Hedgehog, "q_weight", (2, 4, 4), "hedgehog[per=head]"),
        # The shape is wrong: the input is accepted by name, and then its shape is refused.
        (pa.Lucid, "lucid_beta", (5, 2), "lucid[beta=true]"),
    ):
        array = np.ones(shape)
        mechanism, rest = build(cls, {name: array})
        assert str(mechanism) == expected
        assert [*rest] == [name]
        assert rest[name] is array
    mechanism, _ = build(pa.Differential, {"lam": np.ones(2), "per": "token"})
    assert mechanism.per == "token"  # An option that is passed is not changed.
    norms = {"norm": "layer", "eps": 0.1, "window": 2}  # The window is an option of the base.
    assert str(build(pa.QKNorm, norms)[0]) == "qk_norm[norm=layer,eps=0.1](softmax[window=2])"
    mechanism, rest = build(pa.CCQ, {"tau": np.float64(0.5), "covariance": "query_weighted"})
    assert (mechanism.tau, rest) == (0.5, {})
    with pytest.raises(TypeError, match=r"it belongs to forget='unscaled' or forget='scaled'"):
        pa.softmax(Q, K, V, g=np.zeros((1, 5, 2)))


def test_the_shorthand_of_a_third_party_mechanism_follows_its_declaration(unregistered):
    @dataclass(frozen=True)
    class Reweighted(pa.TokenWise):
        """v, or w v with an input `weight`, one for each token or for each token and head."""

        name: ClassVar[str] = "reweighted"
        weighted: bool = flag(False)
        per: str = choice("token", "head")
        output = "b s n e"

        @property
        def inputs(self):
            weight = {"weight": {"token": "b s", "head": "b s n"}[self.per]}
            return pa.Inputs(v="b s n e", **(weight if self.weighted else {}))

        def forward(self, x, frame):
            weight = x["weight"] if self.weighted else np.ones(1)
            return x["v"] * weight.reshape(*weight.shape, *(1,) * (4 - weight.ndim)), ()

    reweighted = pa.shorthand(Reweighted)
    assert reweighted.__name__ == "reweighted"
    assert "weighted, per" in reweighted.__doc__
    assert np.array_equal(reweighted(V), V)
    for shape, options in (((1, 5), {}), ((1, 5, 2), {"per": "head"})):
        assert np.array_equal(reweighted(V, weight=np.full(shape, 2.0), **options), 2 * V)
    with pytest.raises(TypeError, match="did you mean 'weighted'"):
        reweighted(V, weigthed=True)


def parameters(function):
    """The names of the parameters: by position, by name without default, and all others."""
    each = inspect.signature(function).parameters.values()
    by_name = [p for p in each if p.kind is p.KEYWORD_ONLY]
    needed = [p.name for p in by_name if p.default is p.empty]
    others = [p.name for p in by_name if p.default is not p.empty]
    return [p.name for p in each if p.kind is p.POSITIONAL_OR_KEYWORD], needed, others


def test_the_signature_of_a_shorthand_has_inputs_options_and_masks():
    masks = [*CALL_OPTIONS]
    assert parameters(pa.gated_delta) == (["q", "k", "v"], ["g", "beta"], ["scale", *masks])
    first, needed, others = parameters(pa.lucid)
    assert (first, needed) == (["q", "k", "v"], [])
    assert {"lucid_beta", "g", "normalize", "window", "bias"} < {*others}
    shown = pydoc.plain(pydoc.render_doc(pa.gated_delta))
    assert "gated_delta(q: " in shown
    assert "beta: 'Annotated[Array, \"b s u in [0, 2]\"]'" in shown
    assert "S_t = S' + β_t k_t" in shown
    shown = inspect.signature(pa.temperature).parameters
    assert shown["tau"].annotation == 'Annotated[Array, "in (0, inf) or h in (0, inf)"]'
    assert shown["per"].annotation == 'Literal["layer", "head"]'


def test_every_mechanism_has_a_shorthand_with_every_keyword_that_it_accepts_in_its_signature():
    for name, cls in pa.mechanisms().items():
        if cls.__module__.startswith("precondattn."):
            assert getattr(pa, name).__name__ == name
            assert getattr(pa, cls.__name__) is cls
            assert switches_of(cls) is switches_of(cls)  # Derived once.
            own, of_base = options_of(cls)
            accepted = {*own, *of_base, *cls().inputs, *switches_of(cls), *CALL_OPTIONS}
            assert {*inspect.signature(getattr(pa, name)).parameters} == accepted


def test_the_signature_of_a_mechanism_has_its_inputs_and_that_of_a_class_its_options():
    masks = [*CALL_OPTIONS]
    assert parameters(pa.GatedDelta()) == (["q", "k", "v"], ["g", "beta"], masks)
    ccq = pa.parse("ccq(gated_delta)")
    assert parameters(ccq) == (["q", "k", "v"], ["g", "beta", "contraction"], masks)
    with pytest.raises(TypeError, match="missing a required argument: 'contraction'"):
        inspect.signature(ccq).bind(Q, K, V, g=Q, beta=Q)
    assert [*inspect.signature(pa.Temperature).parameters] == ["base", "per"]


def test_a_mechanism_that_a_call_has_built_is_used_again_for_the_same_settings_only():
    windows = [3, 3, 4, np.int64(3)]
    outs = [pa.softmax(Q, K, V, window=window) for window in windows]
    for window, out in zip(windows, outs, strict=True):
        assert np.array_equal(out, pa.Softmax(window=window)(Q, K, V))
    assert pa.softmax(Q, K, V, causal=True).shape == Q.shape
    with pytest.raises(ValueError, match="causal must be true or false; found 1"):
        pa.softmax(Q, K, V, causal=1)  # It is equal to True.
    per_head = pa.temperature(Q, K, V, tau=np.ones(2))
    assert np.array_equal(per_head, pa.temperature(Q, K, V, tau=np.ones(())))
    lengths = np.asarray([3])
    masked = pa.softmax(Q, K, V, lengths=lengths, backend="reference")
    assert np.array_equal(masked, pa.Softmax()(Q, K, V, lengths=lengths, backend="reference"))


USER = """
import numpy as np
import precondattn as pa

q = k = v = np.ones((1, 5, 2, 4))
g = beta = np.ones((1, 5, 2))
pa.gated_delta(q, k, v, g=g, beta=beta, lengths=[3])
pa.softmax(q, k=k, v=v, window=3, bias=np.ones((1, 1, 5, 5)), backend="reference")
pa.windowed(q, k, v, size=2)
pa.shorthand(pa.Lucid)(q, k, v, window=3)
pa.gated_delta(q, k, v, g=g)
pa.gated_delta(q, k, v, g, beta)
pa.softmax(q, k, v, windw=3)
pa.lucid(q, k, v, normalize="row")
"""


@pytest.mark.thorough
def test_a_type_checker_sees_the_parameters_of_shorthands(tmp_path):
    pytest.importorskip("mypy")
    file = tmp_path / "user.py"
    file.write_text(USER)
    command = [sys.executable, "-m", "mypy", "--strict", f"--cache-dir={tmp_path}", str(file)]
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    errors = [line.partition(": error: ")[2] for line in lines if ": error: " in line]
    assert [error.partition(" for ")[0].partition("; ")[0] for error in errors] == [
        'Missing named argument "beta"',
        "Too many positional arguments",
        'Unexpected keyword argument "windw"',
        'Argument "normalize" to "lucid" has incompatible type "Literal[\'row\']"',
    ]
