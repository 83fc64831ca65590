"""Diagnostics: every library, half precision and bad arguments."""

import re

import numpy as np
import pytest

import precondattn as pa
from precondattn.arrays import dtype_name
from precondattn.diagnostics import (
    condition_number,
    covariance_spectrum,
    jacobian_norms,
    leverage_scaling,
    log_mu,
    margin_gain,
    weights,
)
from tests.core.inputs import LIBRARIES, assert_same_in

RNG = np.random.default_rng(0)
Q, K, V = (
    RNG.normal(size=(2, 5, 4, 3)),
    RNG.normal(size=(2, 5, 2, 3)),
    RNG.normal(size=(2, 5, 2, 2)),
)
BETA, ROWS = RNG.uniform(0, 2, size=(2, 5, 2)), 10 ** RNG.normal(size=(12, 4))
DECADES = 10.0 ** np.arange(-7, 0)
LUCID, SOFTMAX = pa.Lucid(), pa.Softmax()
KEYS, MATRICES = RNG.normal(size=(2, 7, 2, 5)) * 0.6 ** np.arange(5), RNG.normal(size=(2, 5, 3))
KEYS[:, [0, 3]] = MATRICES[1] = 0
GATES, NEEDLE = -RNG.exponential(size=(2, 7, 4)), np.tile(np.arange(7) // 2 == 2, (2, 1))
CONTEXT = ~NEEDLE & (np.arange(7) > 1)
QUERIES, TARGET = RNG.normal(size=(2, 4, 4, 5)), RNG.integers(0, 4, size=(2, 4))
CONTRACTION = RNG.uniform(size=(2, 4, 4))


FUNCTIONS = {
    "jacobian of q": (lambda *x: jacobian_norms(LUCID, *x, tokens=(1,))["q"], Q[:, -2:], K, V),
    "jacobian of k": (lambda *x: jacobian_norms(LUCID, *x, tokens=(1,))["k"], Q[:, -2:], K, V),
    "leverage": (leverage_scaling, ROWS),
    "weights": (lambda *x: weights(LUCID, *x), Q, K, V),
    "alignment": (lambda k: pa.alignment(k, rank=2), KEYS),
    "gap": (lambda *x: pa.alignment_gap(*x, rank=2), KEYS, NEEDLE),
    "gap to a context": (lambda *x: pa.alignment_gap(*x, rank=2), KEYS, NEEDLE, CONTEXT),
    "kappa": (condition_number, MATRICES),
    "mu": (log_mu, MATRICES),
    "spectrum": (covariance_spectrum, KEYS),
    "gated spectrum": (covariance_spectrum, KEYS, GATES),
    "margin": (margin_gain, QUERIES, KEYS, TARGET, CONTRACTION),
    "margin of rank 1": (
        lambda *x: margin_gain(*x, rank_one=True),
        *(QUERIES, KEYS, TARGET, CONTRACTION),
    ),
}
COMPILED = {"weights", "alignment"}
"""JAX compiles every operation, so that its other rows belong to the second tier."""


@pytest.mark.parametrize(
    ("name", "library"),
    [
        pytest.param(
            *(name, library),
            marks=[pytest.mark.thorough] * (library == "jax.numpy" and name not in COMPILED),
        )
        for name in FUNCTIONS
        for library in LIBRARIES
    ],
)
def test_every_library_gives_equal_results_in_its_own_arrays(name, library):
    function, *arrays = FUNCTIONS[name]
    assert_same_in(library, function, *arrays)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_half_precision_is_computed_in_float32(name, dtype):
    torch = pytest.importorskip("torch")
    function, *arrays = FUNCTIONS[name]
    given = [torch.asarray(x) for x in arrays]
    narrow = [x.to(getattr(torch, dtype)) if x.is_floating_point() else x for x in given]
    wide = (x.double() if x.is_floating_point() else x for x in narrow)
    found, expected = function(*narrow), function(*wide)
    assert dtype_name(found) == "float32"
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def norms(**wrong):
    jacobian_norms(pa.PerDimScale(), Q, K, V, per_dim=np.ones(3), **wrong)


def margin(q=QUERIES, k=KEYS, target=TARGET, contraction=CONTRACTION):
    margin_gain(q, k, target, contraction)


REFUSED = [
    (lambda: norms(of="qk"), ValueError, "with a batch axis, among q, k, v; found 'qk'"),
    (lambda: norms(of=()), ValueError, "of must be names"),
    (lambda: norms(of=("per_dim",)), ValueError, "found ('per_dim',)"),
    (lambda: norms(tokens=(5,)), ValueError, "whole numbers from 0 to t - 1 = 4; found (5,)"),
    (lambda: norms(tokens=(-1,)), ValueError, "found (-1,)"),
    (lambda: norms(tokens=()), ValueError, "tokens must be whole numbers"),
    (
        lambda: jacobian_norms(pa.Nystrom(2, start="batch"), Q, K, V),
        ValueError,
        "a sequence depends on the others",
    ),
    (lambda: leverage_scaling(ROWS.tolist()), TypeError, "found list"),
    (lambda: leverage_scaling(ROWS[0]), ValueError, "an array (..., n, d); found shape (4,)"),
    (lambda: leverage_scaling(ROWS, 0), ValueError, "a whole number, 1 or above; found 0"),
    (lambda: leverage_scaling(ROWS, True), ValueError, "found True"),
    (
        lambda: weights(pa.ConditionedQuery(), K, K, contraction=K[..., 0]),
        TypeError,
        "reads no values v",
    ),
    (lambda: weights("lucid", K, K, K), TypeError, "a mechanism, such as pa.Lucid(), is expected"),
    (lambda: weights(SOFTMAX, K, K), TypeError, "softmax: missing v"),
    (lambda: weights(SOFTMAX, K, K, [1.0]), TypeError, "v must be an array; found list"),
    (lambda: weights(SOFTMAX, K, K, K[0]), ValueError, "v is declared (b s n e)"),
    *(
        (lambda rank=rank: pa.alignment(KEYS, rank), ValueError, "rank must be")
        for rank in (0, 6, None)
    ),
    (lambda: pa.alignment(KEYS), ValueError, "found 16"),  # The paper's rank.
    (lambda: pa.alignment_gap(KEYS, NEEDLE, rank=6), ValueError, "from 1 to d = 5"),
    (lambda: pa.alignment(KEYS[0], 2), ValueError, "k "),
    (lambda: pa.alignment(KEYS.tolist(), 2), TypeError, "k "),
    (lambda: pa.alignment(KEYS * 1j, 2), TypeError, "k "),
    (lambda: pa.alignment_gap(KEYS, NEEDLE * 1.0, rank=2), ValueError, "needle must be boolean"),
    (lambda: pa.alignment_gap(KEYS, NEEDLE, CONTEXT[:, 1:], rank=2), ValueError, "context"),
    (lambda: condition_number([[1.0]]), TypeError, "a must be an array of "),
    (lambda: log_mu(np.ones((2, 2), dtype=int)), TypeError, "a floating dtype; found int64"),
    (lambda: log_mu(np.ones(3)), ValueError, "a must be an array (..., n, d); found shape (3,)"),
    (lambda: log_mu(np.ones((2, 0, 3))), ValueError, "a must have a row and a column; found"),
    (lambda: covariance_spectrum(KEYS, [0.0]), TypeError, "g must be an array of "),
    (lambda: covariance_spectrum(KEYS, GATES[:, 1:]), ValueError, "(b, s, h) = (2, 7, 4)"),
    (lambda: covariance_spectrum(KEYS, GATES[..., :3]), ValueError, "a multiple of n = 2 heads"),
    (lambda: margin(k=KEYS[0]), ValueError, "k must be an array (b, s, n, d)"),
    (lambda: margin(q=QUERIES[..., :3]), ValueError, "q must have the shape (b, t, h, d) = (2, 4,"),
    (lambda: margin(q=QUERIES[:, :, :1]), ValueError, "a multiple of n = 2 heads, and at most s ="),
    (lambda: margin(contraction=TARGET * 1.0), ValueError, "an array (b, t, h)"),
    (lambda: margin(target=TARGET * 1.0), TypeError, "target must be an integer array (b, t)"),
    (lambda: margin(target=TARGET[:, 1:]), ValueError, "target must have the shape (b, t)"),
    (lambda: margin(target=TARGET * 0 + 7), ValueError, "from 0 to s - 1 = 6; found 7 to 7"),
]


@pytest.mark.parametrize(("call", "error", "words"), REFUSED)
def test_bad_arguments_are_named(call, error, words):
    with pytest.raises(error, match=re.escape(words)):
        call()
