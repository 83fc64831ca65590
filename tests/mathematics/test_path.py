"""PaTH, and LUCID over it: directions and gates of every kind, and caches that flush.

With H_t = I − β_t w_t w_tᵀ the scores are A_ij = q_iᵀ H_i H_{i−1} … H_{j+1} k_j. LUCID over PaTH
solves with Φ_ij = exp(s A_ij − s d), whose A is that of the normalised keys with themselves and the
same reflections. Outputs and gradients of ordinary inputs are compared in `test_definitions.py`.
Unless a test says so everything is float64, and has to hold to 1e-10 of the largest number.
"""

from itertools import pairwise

import numpy as np
import pytest

import precondattn as pa
from tests.mathematics.definitions import assert_is_defined, definition
from tests.mathematics.identities import assert_close
from tests.mathematics.problems import Problem

BETAS = {"zeros": 0.0, "ones": 1.0, "twos": 2.0, "mixed": (0.0, 0.5, 1.0, 2.0)}
DIRECTIONS = ("unit", "keys", "repeated", "raw", "zero")
FLUSHES = (1, 2, 3, 5)
BOTH = ("path[{}]", "lucid(path[{}])")


def inputs_of(p, m, directions="unit", betas="mixed"):
    """Directions w of length 1, of any length (raw), or zero, and β of a kind."""
    x = p.x(m)
    match directions:
        case "keys":
            size = np.linalg.norm(p.k, axis=-1, keepdims=True)
            x["w"] = p.k / np.where(size == 0, 1, size)
        case "repeated":
            x["w"] = np.broadcast_to(x["w"][:, :1], x["w"].shape).copy()
        case "raw":
            x["w"] = x["w"] * p.rng.uniform(0.2, 1.1, size=(*p.k.shape[:3], 1))
        case "zero":
            x["w"] = 0 * x["w"]
    x["beta"] = p.rng.choice(np.atleast_1d(BETAS[betas]), size=x["beta"].shape)
    return x


def at(x, tokens):
    return {name: array[:, tokens] for name, array in x.items()}


@pytest.mark.parametrize("kind", ["random", "clustered", "duplicate", "zero"])
@pytest.mark.parametrize("directions", DIRECTIONS)
@pytest.mark.parametrize("text", ["path", "lucid(path)"])
def test_reflections_of_every_kind_give_the_output_and_gradient_of_the_definition(
    text, directions, kind
):
    m = pa.parse(text)
    for betas in BETAS:
        p = Problem(0, kind, s=7, t=5 if kind == "random" else 7, n=2, group=2)
        assert_is_defined(m, inputs_of(p, m, directions, betas))


@pytest.mark.parametrize("forget", ["unscaled", "scaled"])
def test_a_closed_gate_forgets_all_that_came_before(forget):
    m, plain, p = pa.Path(forget=forget), pa.Path(), Problem(s=8, n=2, group=2)
    x = inputs_of(p, m)
    for cut in (0, 3, 7):
        g = np.where(np.arange(8)[:, None] == cut, -1e4, 0.0) + np.zeros_like(x["g"])
        assert_is_defined(m, x | {"g": g})
        rest = {name: a for name, a in x.items() if name != "g"}
        out = m(**x | {"g": g})
        assert_close(out[:, cut:], plain(**at(rest, slice(cut, None))))
    closed, pullback = m.vjp(**x | {"g": np.full_like(x["g"], -1e4)})
    assert_close(closed, np.repeat(p.v, 2, axis=2))
    gradients = pullback(p.like_output())
    for name in ("q", "k", "w", "beta", "g"):
        assert_close(gradients[name], 0.0, size=1)


@pytest.mark.parametrize("text", ["path", "path[forget=unscaled]"])
def test_enormous_reflections_of_the_future_change_no_bit_of_past_outputs(text):
    m, p = pa.parse(text), Problem(s=8, n=2, group=2)
    x = inputs_of(p, m)
    before = m(**x)[:, :5]
    moved = {
        name: np.concatenate([a[:, :5], 1e3 * a[:, 5:] - 0.5], axis=1) for name, a in x.items()
    }
    for changed in (moved, *({name: moved[name]} for name in x)):
        np.testing.assert_array_equal(m(**x | changed)[:, :5], before)


def test_long_directions_of_one_segment_do_not_affect_the_next():
    p = Problem(s=9)
    x, first = inputs_of(p, pa.Path()), np.arange(9) < 4
    x["w"] = np.where(first[:, None, None], 1e3 * x["w"], x["w"])
    packed, pullback = pa.Path().vjp(**x, segment_ids=np.tile(1 - first, (2, 1)))
    alone, pullback_alone = pa.Path().vjp(**at(x, ~first))
    assert_close(packed[:, ~first], alone)
    cotangent = np.where(first[:, None, None], 0, p.like_output())
    gradients, expected = pullback(cotangent), pullback_alone(cotangent[:, ~first])
    for name in expected:
        assert_close(gradients[name][:, ~first], expected[name])
        assert np.all(gradients[name][:, first] == 0)


# Caches


def decode(m, x, widths):
    """The output of blocks of these widths, and the last cache."""
    cuts = [0, *np.cumsum(widths).tolist()]
    cache, outs = m.init_cache(*(x[name] for name in "qkv"), capacity=cuts[-1]), []
    for start, stop in pairwise(cuts):
        out, cache = m.extend(cache, **at(x, slice(start, stop)))
        outs.append(out)
    return np.concatenate(outs, axis=1), cache


def with_flush(text, flush):
    return pa.parse(text.format(f"flush={flush}"))


@pytest.mark.parametrize("directions", DIRECTIONS)
@pytest.mark.parametrize("flush", FLUSHES)
@pytest.mark.parametrize("text", BOTH)
def test_decoding_one_by_one_over_many_flushes_is_the_definition(text, flush, directions):
    m, length = with_flush(text, flush), max(6, 3 * flush + 1)
    x = inputs_of(Problem(0, "clustered", s=length, group=2), m, directions)
    out, _ = decode(m, x, [1] * length)
    assert_close(out, definition(m, x)[0].real)


@pytest.mark.parametrize("text", BOTH)
@pytest.mark.parametrize("flush", FLUSHES)
def test_the_cache_stores_keys_as_of_the_last_flush_and_the_reflections_since(text, flush):
    m = with_flush(text, flush)
    x = inputs_of(Problem(s=8, n=2), m)
    for length in range(flush, 9):
        flushed = length - length % flush
        now, then = (decode(m, at(x, slice(n)), [1] * n)[1].store for n in (length, flushed))
        keys = "path(k,w,beta)"
        np.testing.assert_array_equal(now[keys][:, :flushed], then[keys][:, :flushed])
        for name in ("w", "beta") if flush > 1 else ():
            since = now[f"pending({name})"][:, : length - flushed]
            np.testing.assert_array_equal(since, x[name][:, flushed:length])


@pytest.mark.parametrize(
    "text", ["path[{}]", "path[{},window=3]", "path[{},forget=unscaled]", "lucid(path[{}])"]
)
@pytest.mark.parametrize("flush", [1, 3])
def test_masked_keys_in_a_ragged_cache_neither_reflect_nor_are_attended_to(text, flush):
    m = with_flush(text, flush)
    x = inputs_of(Problem(s=10, group=2), m)
    mask = np.random.default_rng(1).random((2, 10)) < 0.6
    cache, outs = m.init_cache(*(x[name] for name in "qkv"), capacity=10, key_mask=True), []
    for start, stop, counts in ((0, 4, [4, 1]), (4, 5, [0, 1]), (5, 10, [3, 5])):
        part, seen = at(x, slice(start, stop)), mask[:, start:stop]
        out, cache = m.extend(cache, **part, key_mask=seen, lengths=counts)
        outs.append(out)
    out = np.concatenate(outs, axis=1)
    for i, valid in enumerate(([0, 1, 2, 3, 5, 6, 7], [0, 4, 5, 6, 7, 8, 9])):
        alone = {name: a[i : i + 1, valid] for name, a in x.items()}
        expected = definition(m, alone, key_mask=mask[i : i + 1, valid])[0].real
        assert_close(out[i : i + 1, valid], expected, size=1 + np.abs(expected).max())
        assert np.all(np.delete(out[i], valid, axis=0) == 0)


@pytest.mark.parametrize(("flush", "dtype"), [(1, "float32"), (7, "bfloat16")])
@pytest.mark.parametrize("text", BOTH)
def test_hundreds_of_single_steps_stay_accurate(text, flush, dtype):
    m, count = with_flush(text, flush), 120
    x = inputs_of(Problem(s=count, d=8, b=1), m)
    if dtype == "bfloat16":
        torch = pytest.importorskip("torch")
        given = {name: torch.tensor(a).to(torch.bfloat16) for name, a in x.items()}
        exact = {name: a.double().numpy() for name, a in given.items()}
    else:
        given = {name: a.astype(dtype) for name, a in x.items()}
        exact = {name: a.astype(np.float64) for name, a in given.items()}
    cache, outs = m.init_cache(*(given[name] for name in "qkv"), capacity=count), []
    for t in range(count):
        out, cache = m.extend(cache, **at(given, slice(t, t + 1)), donate=True)
        assert dtype in str(out.dtype)
        outs.append(out.double().numpy() if dtype == "bfloat16" else out)
    expected = definition(m, exact)[0].real
    within = 2e-2 if dtype == "bfloat16" else 2e-5
    assert np.abs(np.concatenate(outs, axis=1) - expected).max() <= within * np.abs(expected).max()


@pytest.mark.parametrize("how", ["at once", "one by one"])
@pytest.mark.parametrize("forget", ["unscaled", "scaled"])
def test_a_closed_gate_in_single_precision_leaves_later_gates_accurate(forget, how):
    m = pa.Path(forget=forget)
    x = inputs_of(Problem(s=12), m)
    x["g"][:, 3] = -1e4
    x = {name: a.astype(np.float32) for name, a in x.items()}
    out = m(**x) if how == "at once" else decode(m, x, [1] * 12)[0]
    expected = definition(m, {name: a.astype(np.float64) for name, a in x.items()})[0].real
    assert np.abs(out - expected).max() <= 2e-5 * np.abs(expected).max()
