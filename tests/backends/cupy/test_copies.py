"""Asynchronous copies in the simulator: what arrives, and that reading too early shows."""

from pathlib import Path

import numpy as np
import pytest

from precondattn_cupy.sources import FOLDER
from precondattn_kernel_tools.cuda_simulator import SimulatedModule, checked
from tests.backends.cupy.simulated import ORDERS
from tests.kernel_tools.toolchain import needs_simulator

pytestmark = needs_simulator

SOURCE = Path(__file__).with_name("cuda_tensors") / "copies.cu"
X = np.arange(128, dtype=np.float32)
IS_THERE = np.arange(32, dtype=np.uint8) % 3 > 0


def copied(reads_early, order=None):
    name = f"copied<{str(reads_early).lower()}>"
    kernel = SimulatedModule(SOURCE, [name], (f"-I{FOLDER}",)).get_function(name)
    to = np.full_like(X, np.nan)
    with checked(order):
        kernel((1,), (32,), (X, IS_THERE.astype(np.uint8), to))
    return to


@pytest.mark.parametrize("order", ORDERS)
def test_rows_arrive_and_absent_rows_are_zero(order):
    expected = np.where(IS_THERE[:, None], X.reshape(32, 4), 0)
    np.testing.assert_array_equal(copied(False, order), np.roll(expected, -1, axis=0).ravel())


def test_rows_are_nan_before_they_have_arrived():
    assert np.isnan(copied(True)).all()
