"""The diagnosis of a function that follows another convention names that convention."""

import inspect

import numpy as np
import pytest

import precondattn as pa
from precondattn_conformance import backend_from_function
from precondattn_conformance.functions.diagnosis import diagnosis


def of(expression, **options):
    """The definition of a mechanism, as a function of inputs by their names."""
    mechanism = pa.parse(expression)
    return lambda **x: np.asarray(mechanism(**x, **options, backend="reference"))


def with_inputs(expression, **changes):
    """The definition of inputs of which some are computed from all inputs."""
    return lambda **x: of(expression)(**(x | {n: change(x) for n, change in changes.items()}))


def unit(name):
    return lambda x: x[name] / np.linalg.norm(x[name], axis=-1, keepdims=True)


def tiled(name):
    return lambda x: np.tile(x[name], (1, 1, x["q"].shape[2] // x[name].shape[2], 1))


def first_keys(name):
    return lambda x: x[name][:, : x["q"].shape[1]]


def moved(array, by):
    moved = np.roll(array, by, axis=1)
    moved[:, 0 if by > 0 else -1] = 0
    return moved


def log_of(x):
    g = x["g"]
    return np.where(g > 0, np.log(np.where(g > 0, g, 1)), -np.inf)


def ones(x):
    return np.ones_like(x["beta"])


def eps_outside(name):
    return lambda x: x[name] / (np.sqrt(np.mean(x[name] ** 2, axis=-1, keepdims=True)) + 1e-6)


def scaled_twice(**x):
    return of(f"softmax[scale={1 / x['q'].shape[-1]}]")(**x)


def before_token(**x):
    return moved(of("kda")(**(x | {"q": moved(x["q"], -1)})), 1)


def heads_first(**x):
    return np.swapaxes(of("softmax")(**{n: np.swapaxes(a, 1, 2) for n, a in x.items()}), 1, 2)


GATED = "gated_delta"
PLANTED = {
    "query head i reads key head i mod n": (
        "softmax",
        with_inputs("softmax", k=tiled("k"), v=tiled("v")),
    ),
    "the first query is aligned with the first key": (
        "softmax",
        with_inputs("softmax", k=first_keys("k"), v=first_keys("v")),
    ),
    "the scale is left out": ("softmax", of("softmax[scale=1.0]")),
    "the scale is applied twice": ("softmax", scaled_twice),
    "every query reads every key": ("softmax", of("softmax[causal=false]")),
    "q and k are swapped": (
        "softmax",
        with_inputs("softmax", q=lambda x: x["k"], k=lambda x: x["q"]),
    ),
    "the axes are in the order bhtd": ("softmax", heads_first),
    "g is the decay itself, and not its logarithm": (GATED, with_inputs(GATED, g=log_of)),
    "the gate of a token acts one token late": (
        GATED,
        with_inputs(GATED, g=lambda x: moved(x["g"], 1)),
    ),
    "the gate of a token acts one token early": (
        GATED,
        with_inputs(GATED, g=lambda x: moved(x["g"], -1)),
    ),
    "a query reads the state before its token": ("kda", before_token),
    "the delta rule reads the state before its decay": (
        GATED,
        with_inputs("comba", p=lambda x: x["k"]),
    ),
    "queries and keys are normalised to length 1": (
        "gla",
        with_inputs("gla", q=unit("q"), k=unit("k")),
    ),
    "keys are normalised to length 1": ("gla", with_inputs("gla", k=unit("k"))),
    "queries are normalised to length 1": ("kda", with_inputs("kda", q=unit("q"))),
    "beta is left out": (GATED, with_inputs(GATED, beta=ones)),
    "beta scales what is written, and not what is erased": (
        GATED,
        with_inputs(GATED, v=lambda x: x["v"] * x["beta"][..., None], beta=ones),
    ),
    "eps is added to the norm, and not under its root": (
        "qk_norm",
        with_inputs("softmax", q=eps_outside("q"), k=eps_outside("k")),
    ),
    "eps is left out": ("qk_norm", of("qk_norm[eps=0.0]")),
}


def backend_of(expression, function, **options):
    """The backend of a function with a parameter for each input of the mechanism."""

    def named(**x):
        return function(**x)

    named.__signature__ = inspect.Signature(
        [inspect.Parameter(x, inspect.Parameter.KEYWORD_ONLY) for x in pa.parse(expression).inputs]
    )
    return backend_from_function(named, expression, library="numpy", gradient=False, **options)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("sentence", PLANTED)
def test_a_planted_convention_is_named(sentence):
    findings = diagnosis(backend_of(*PLANTED[sentence]))
    assert findings
    first, _ = findings[0].explained[0]
    assert first.startswith(sentence)
    assert len(findings[0].explained) == 1
    assert "wrong as declared" in str(findings[0])


def test_float32_inside_is_named_alone_and_beside_another_convention():
    def of_float32(scale):
        def function(**x):
            rounded = {name: array.astype(np.float32) for name, array in x.items()}
            rounded["q"] = rounded["q"] * scale(x)
            out = np.asarray(of("softmax")(**rounded), np.float32)
            return out.astype(x["v"].dtype) * np.nextafter(1, 2)  # It has float64's precision.

        return backend_of("softmax", function, dtypes=["float64"])

    alone = diagnosis(of_float32(lambda x: 1))
    unscaled = diagnosis(of_float32(lambda x: x["q"].shape[-1] ** 0.5))
    assert {finding.explained[0][0] for finding in alone} == {"it computes in float32"}
    ((sentence, error), *_) = unscaled[0].explained
    assert sentence == "the scale is left out, and it computes in float32"
    assert 1e-9 < error < 1e-5


def of_first_tokens(**x):
    """Functions of a recurrence take as many queries as keys."""
    return of("kda")(**{name: a[:, : x["q"].shape[1]] for name, a in x.items()})


@pytest.mark.parametrize(
    ("expression", "function"), [("softmax", of("softmax")), ("kda", of_first_tokens)]
)
def test_a_right_function_has_no_diagnosis(expression, function):
    assert diagnosis(backend_of(expression, function)) == []


def test_what_no_convention_explains_is_said_to_be_unexplained():
    def wrong(q, k, v):
        return np.repeat(v, q.shape[2] // v.shape[2], axis=2)[:, -q.shape[1] :] * 2

    (finding, *_) = diagnosis(backend_of("softmax", wrong))
    assert finding.explained == ()
    assert "no known convention explains it" in str(finding)
