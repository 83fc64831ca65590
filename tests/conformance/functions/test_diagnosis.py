"""The diagnosis of a function that follows another convention names that convention."""

import numpy as np
import pytest

import precondattn as pa
from precondattn_conformance import backend_from_function
from precondattn_conformance.functions.diagnosis import diagnosis


def by_definition(expression, **options):
    mechanism = pa.parse(expression)

    def function(x):
        return np.asarray(mechanism(**x, **options, backend="reference"))

    return function


SOFTMAX, GATED_DELTA, KDA, GLA = map(by_definition, ("softmax", "gated_delta", "kda", "gla"))


def unit(rows):
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def tiled(array, heads):
    return np.tile(array, (1, 1, heads // array.shape[2], *(1,) * (array.ndim - 3)))


def shifted(array, by):
    moved = np.roll(array, by, axis=1)
    moved[:, 0 if by > 0 else -1] = 0
    return moved


def tiled_heads(q, k, v):
    return SOFTMAX({"q": q, "k": tiled(k, q.shape[2]), "v": tiled(v, q.shape[2])})


def top_left(q, k, v):
    t = q.shape[1]
    return SOFTMAX({"q": q, "k": k[:, :t], "v": v[:, :t]})


def without_scale(q, k, v):
    return by_definition("softmax[scale=1.0]")({"q": q, "k": k, "v": v})


def scaled_twice(q, k, v):
    return by_definition(f"softmax[scale={1 / q.shape[-1]}]")({"q": q, "k": k, "v": v})


def of_all_keys(q, k, v):
    return by_definition("softmax[causal=false]")({"q": q, "k": k, "v": v})


def swapped(q, k, v):
    return SOFTMAX({"q": k, "k": q, "v": v})


def of_decays(q, k, v, g, beta):
    with np.errstate(invalid="ignore", divide="ignore"):
        g = np.where(g > 0, np.log(np.where(g > 0, g, 1)), -np.inf)
    return GATED_DELTA({"q": q, "k": k, "v": v, "g": g, "beta": beta})


def late_gate(q, k, v, g, beta):
    return GATED_DELTA({"q": q, "k": k, "v": v, "g": shifted(g, 1), "beta": beta})


def early_gate(q, k, v, g, beta):
    return GATED_DELTA({"q": q, "k": k, "v": v, "g": shifted(g, -1), "beta": beta})


def before_token(q, k, v, g, beta):
    x = {"q": shifted(q, -1), "k": k, "v": v, "g": g, "beta": beta}
    return shifted(KDA(x), 1)


def before_decay(q, k, v, g, beta):
    return by_definition("comba")({"q": q, "k": k, "v": v, "g": g, "beta": beta, "p": k})


def normalised(q, k, v, g):
    return GLA({"q": unit(q), "k": unit(k), "v": v, "g": g})


def normalised_keys(q, k, v, g):
    return GLA({"q": q, "k": unit(k), "v": v, "g": g})


def normalised_queries(q, k, v, g, beta):
    return KDA({"q": unit(q), "k": k, "v": v, "g": g, "beta": beta})


def without_beta(q, k, v, g, beta):
    return GATED_DELTA({"q": q, "k": k, "v": v, "g": g, "beta": np.ones_like(beta)})


def beta_of_values(q, k, v, g, beta):
    x = {"q": q, "k": k, "v": v * beta[..., None], "g": g, "beta": np.ones_like(beta)}
    return GATED_DELTA(x)


def eps_outside(q, k, v):
    q, k = (x / (np.sqrt(np.mean(x**2, axis=-1, keepdims=True)) + 1e-6) for x in (q, k))
    return SOFTMAX({"q": q, "k": k, "v": v})


def without_eps(q, k, v):
    return by_definition("qk_norm[eps=0.0]")({"q": q, "k": k, "v": v})


def heads_first(q, k, v):
    swap = [np.swapaxes(x, 1, 2) for x in (q, k, v)]
    return np.swapaxes(SOFTMAX(dict(zip("qkv", swap, strict=True))), 1, 2)


PLANTED = [
    (tiled_heads, "softmax", "query head i reads key head i mod n"),
    (top_left, "softmax", "the first query is aligned with the first key"),
    (without_scale, "softmax", "the scale is left out"),
    (scaled_twice, "softmax", "the scale is applied twice"),
    (of_all_keys, "softmax", "every query reads every key"),
    (swapped, "softmax", "q and k are swapped"),
    (heads_first, "softmax", "the axes are in the order bhtd"),
    (of_decays, "gated_delta", "g is the decay itself, and not its logarithm"),
    (late_gate, "gated_delta", "the gate of a token acts one token late"),
    (early_gate, "gated_delta", "the gate of a token acts one token early"),
    (before_token, "kda", "a query reads the state before its token"),
    (before_decay, "gated_delta", "the delta rule reads the state before its decay"),
    (normalised, "gla", "queries and keys are normalised to length 1"),
    (normalised_keys, "gla", "keys are normalised to length 1"),
    (normalised_queries, "kda", "queries are normalised to length 1"),
    (without_beta, "gated_delta", "beta is left out"),
    (beta_of_values, "gated_delta", "beta scales what is written, and not what is erased"),
    (eps_outside, "qk_norm", "eps is added to the norm, and not under its root"),
    (without_eps, "qk_norm", "eps is left out"),
]


@pytest.mark.parametrize(
    ("function", "expression", "sentence"), PLANTED, ids=[each[0].__name__ for each in PLANTED]
)
def test_a_planted_convention_is_named(function, expression, sentence):
    backend = backend_from_function(function, expression, library="numpy", gradient=False)
    findings = diagnosis(backend)
    assert findings
    first, _ = findings[0].explained[0]
    assert first.startswith(sentence)
    assert len(findings[0].explained) == 1
    assert "wrong as declared" in str(findings[0])


def test_float32_inside_is_named_alone_and_beside_another_convention():
    def of_float32(change):
        def function(q, k, v):
            arrays = {"q": q, "k": k, "v": v}
            rounded = {name: array.astype(np.float32) for name, array in arrays.items()}
            out = np.asarray(SOFTMAX(change(rounded)), np.float32)
            return out.astype(v.dtype) * np.nextafter(1, 2)  # It has the precision of float64.

        return backend_from_function(function, "softmax", library="numpy", dtypes=["float64"])

    plain = diagnosis(of_float32(lambda x: x))
    swapped = diagnosis(of_float32(lambda x: x | {"q": x["q"] * x["q"].shape[-1] ** 0.5}))
    assert {finding.explained[0][0] for finding in plain} == {"it computes in float32"}
    ((sentence, error), *_) = swapped[0].explained
    assert sentence == "the scale is left out, and it computes in float32"
    assert 1e-9 < error < 1e-5


def test_a_right_function_has_no_diagnosis():
    def right(q, k, v):
        return SOFTMAX({"q": q, "k": k, "v": v})

    assert diagnosis(backend_from_function(right, "softmax", library="numpy")) == []


def test_what_no_convention_explains_is_said_to_be_unexplained():
    def wrong(q, k, v):
        return np.repeat(v, q.shape[2] // v.shape[2], axis=2)[:, -q.shape[1] :] * 2

    (finding, *_) = diagnosis(backend_from_function(wrong, "softmax", library="numpy"))
    assert finding.explained == ()
    assert "no known convention explains it" in str(finding)
