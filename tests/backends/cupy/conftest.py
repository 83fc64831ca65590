"""The kernels of the CuPy backend run in the simulator here, also on a machine with a GPU."""

import os

import numpy as np
import pytest

from precondattn_cupy import layout, scan
from precondattn_cupy.launch import SIMULATE
from precondattn_cupy.lucid import solve as lucid_solve
from precondattn_cupy.lucid import step as lucid_step
from precondattn_cupy.softmax import attention, laser
from precondattn_cupy.softmax import leaf as softmax
from precondattn_cupy.softmax import step as softmax_step

os.environ[SIMULATE] = "1"


@pytest.fixture(autouse=True)
def unwritten_is_nan(monkeypatch):
    """What no kernel writes is NaN; recurrences have segments of a few tokens."""

    def empty(like, shape, dtype=None):
        array = np.empty(shape, like.dtype if dtype is None else dtype)
        array.fill(-1 if array.dtype.kind in "iu" else np.nan)
        return array

    modules = (layout, attention, softmax, softmax_step, laser, scan, lucid_solve, lucid_step)
    for module in modules:
        monkeypatch.setattr(module, "empty", empty)
    monkeypatch.setattr(scan, "SEGMENT", 8)
