"""A convolution over tokens by products with a band matrix, against its definition by shifts."""

import numpy as np
import pytest
import torch

from precondattn.spec import nystrom
from precondattn_portable import banded_convolution
from precondattn_portable.arithmetic import IN_PLACE
from precondattn_torch.arithmetic import TORCH

LIBRARIES = {"numpy": (IN_PLACE, np.asarray), "torch": (TORCH, torch.from_numpy)}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    ("taps", "tokens"), [(1, 130), (2, 1), (5, 30), (5, 130), (64, 64), (65, 130), (65, 30)]
)
def test_it_is_that_of_the_definition_and_so_are_its_gradients(tokens, taps, dtype, library):
    """Outputs and gradients; PyTorch's own convolution has a wrong gradient with 65 weights."""
    ops, array = LIBRARIES[library]
    rng = np.random.default_rng(taps)
    v, d_y = rng.normal(size=(2, 2, 3, tokens, 4)).astype(dtype)
    weight = rng.normal(size=(3, taps)).astype(dtype)
    found = (
        banded_convolution.convolved(ops, array(v), array(weight)),
        *banded_convolution.convolved_vjp(ops, array(v), array(weight), array(d_y)),
    )
    v, d_y, weight = (x.astype(np.float64) for x in (v, d_y, weight))
    expected = (
        nystrom.convolved(v, weight),
        *nystrom.convolved_vjp(v, weight, d_y),
    )
    for one, other in zip(found, expected, strict=True):
        size = 1e-12 if dtype == "float64" else 1e-5
        np.testing.assert_allclose(np.asarray(one), other, rtol=0, atol=size * np.abs(other).max())
