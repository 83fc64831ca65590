"""The convolution of Nyström attention's skip, by each library's own means."""

import numpy as np
import pytest
import torch

from precondattn.spec import token_convolution
from precondattn_portable.arithmetic import IN_PLACE
from precondattn_torch.arithmetic import TORCH
from tests.mathematics.identities import assert_close

LIBRARIES = {"numpy": (IN_PLACE, np.asarray), "torch": (TORCH, torch.from_numpy)}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("taps", [1, 2, 3, 4, 30])
def test_it_is_that_of_the_definition_and_so_are_its_gradients(library, taps):
    ops, array = LIBRARIES[library]
    rng = np.random.default_rng(taps)
    v, d_y, weight = (
        rng.normal(size=(2, 3, 11, 2)),
        rng.normal(size=(2, 3, 11, 2)),
        rng.normal(size=(3, taps)),
    )
    assert_close(
        np.asarray(ops.convolved(array(v), array(weight))), token_convolution.convolved(v, weight)
    )
    found = ops.convolved_vjp(array(v), array(weight), array(d_y))
    for one, expected in zip(found, token_convolution.convolved_vjp(v, weight, d_y), strict=True):
        assert_close(np.asarray(one), expected)
