"""κ and μ of matrices (Preconditioned Attention, Definition 4.1, Theorem 4.2 and Eq. 10).

They are computed here without singular values: κ² and μ² of A from the eigenvalues and the
determinant of its smaller Gram matrix.
"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import precondattn as pa
from tests.mathematics.identities import assert_close

condition_number, log_mu = pa.diagnostics.condition_number, pa.diagnostics.log_mu


@st.composite
def matrices(draw):
    """Matrices (2, 3, n, d) of full rank, tall or wide, of rows that differ in length."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n, d = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    return 10.0 ** rng.uniform(-1, 1, size=(2, 3, n, 1)) * rng.normal(size=(2, 3, n, d))


def gram(a):
    return a @ a.swapaxes(-1, -2) if a.shape[-2] < a.shape[-1] else a.swapaxes(-1, -2) @ a


@given(matrices(), st.floats(-100, 100))
def test_kappa_and_mu_are_those_of_the_gram_matrix_and_no_factor_matters(a, exponent):
    eigenvalues, size = np.linalg.eigvalsh(gram(a)), min(a.shape[-2:])
    kappa = condition_number(a)
    assert kappa.shape == a.shape[:2]
    expected = np.sqrt(eigenvalues[..., -1] / eigenvalues[..., 0])
    assert np.all(np.abs(kappa / expected - 1) <= 1e-13 * kappa**2)  # The Gram matrix squares κ.
    _, log_determinant = np.linalg.slogdet(gram(a))
    norm = np.sqrt(np.sum(a**2, axis=(-1, -2)) / size)
    expected = math.log(2) - log_determinant / 2 + size * np.log(norm)
    assert np.all(np.abs(log_mu(a) - expected) <= 1e-13 * size * kappa**2)
    assert np.all(np.log(kappa) < log_mu(a))
    scaled = 10.0**exponent * a
    assert_close(condition_number(scaled) / kappa, np.ones((2, 3)))
    assert_close(log_mu(scaled), log_mu(a))


@pytest.mark.parametrize("a", [np.zeros((3, 2)), np.diag([2.0, 1.0, 0.0])], ids=["zero", "rank 2"])
def test_a_singular_value_of_0_gives_infinity_without_a_warning(a):
    assert [condition_number(a), log_mu(a)] == [math.inf] * 2


def test_the_logarithm_of_a_mu_beyond_the_dtype_is_finite():
    a = np.diag(10.0 ** np.arange(-40, 40))
    assert 1e3 < log_mu(a) < 1e4
