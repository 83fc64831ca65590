"""LASER, row normalisation and differential attention over PaTH."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import precondattn as pa
from tests.mathematics.path_definition import (
    PathProblem,
    assert_close,
    assert_gradients,
    decode,
    path_by_loops,
    problems,
    read,
    sampled,
    weights_by_loops,
    with_flush,
)


def laser_by_loops(q, k, v, w, beta):
    return np.log(read(weights_by_loops(q, k, w, beta), np.exp(v)))


def row_normalized_by_loops(**inputs):
    out = path_by_loops(**inputs)
    return out / np.sqrt(np.sum(out * out, axis=-1, keepdims=True))


def differential_by_loops(q, k, v, w, beta, q2, k2, lam):
    first, second = (path_by_loops(*x, v, w, beta) for x in ((q, k), (q2, k2)))
    return first - lam * second


@pytest.mark.parametrize("flush", [1, 3])
@pytest.mark.parametrize(
    "layer",
    [
        "differential(path[{}])",
        "differential(lucid(path[{}]))",
        "row_normalized(path[{}])",
        "row_normalized(lucid(laser(path[{}])))",
    ],
)
def test_decoding_a_composition_gives_the_output_of_the_full_call(layer, flush):
    p = PathProblem(np.random.default_rng(0), s=10, n=2, group=2)
    inputs, composition = p.inputs, with_flush(layer, flush)
    if layer.startswith("differential"):
        second = {"q2": p.rng.normal(size=p.q.shape), "k2": p.rng.normal(size=p.k.shape)}
        inputs |= second | {"lam": np.asarray(0.4)}
    for widths in ([1] * 10, [4, 1, 1, 4]):
        out, _ = decode(composition, inputs, widths)
        assert_close(out, composition(**inputs))


@sampled
@given(problems(square=False))
def test_laser_over_path_is_the_definition(p):
    out = pa.parse("laser(path)")(**p.inputs)
    assert_close(out, laser_by_loops(**p.inputs), size=1)


@sampled
@given(problems(square=False))
def test_row_normalized_path_is_the_definition(p):
    expected = row_normalized_by_loops(**p.inputs)
    long = np.linalg.norm(path_by_loops(**p.inputs), axis=-1) > 1e-3
    assert_close(pa.parse("row_normalized(path)")(**p.inputs)[long], expected[long], size=1)


@sampled
@given(problems(square=False), st.floats(-1, 2))
def test_differential_path_is_the_definition(p, lam):
    second = {"q2": p.rng.normal(size=p.q.shape), "k2": p.rng.normal(size=p.k.shape)}
    inputs = p.inputs | second | {"lam": np.asarray(lam)}
    out = pa.parse("differential(path)")(**inputs)
    assert_close(out, differential_by_loops(**inputs), size=3 * np.abs(p.v).max())


def test_gradients_of_compositions_are_those_of_their_definitions():
    p = PathProblem(np.random.default_rng(0), s=4, group=2, d=2, b=1)
    assert_gradients(pa.Laser(pa.Path()), laser_by_loops, p.inputs)
    detached = pa.RowNormalized(pa.Path(), detach=False)
    assert_gradients(detached, row_normalized_by_loops, p.inputs)
    second = {"q2": p.rng.normal(size=p.q.shape), "k2": p.rng.normal(size=p.k.shape)}
    inputs = p.inputs | second | {"lam": np.asarray(0.4)}
    assert_gradients(pa.Differential(pa.Path()), differential_by_loops, inputs)
