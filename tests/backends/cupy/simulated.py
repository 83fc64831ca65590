"""What tests of the CuPy backend share: kernels in the simulator, and NumPy's dtypes."""

import os
import shutil

import pytest

pytest.importorskip("ml_dtypes")

import ml_dtypes
import numpy as np

from precondattn_cupy.launch import SIMULATE
from precondattn_kernel_tools import cuda_toolkit

try:
    cuda_toolkit.include_folder()
except cuda_toolkit.MissingToolError as missing:
    pytest.skip(str(missing), allow_module_level=True)
if shutil.which("g++") is None:
    pytest.skip("g++ is not installed", allow_module_level=True)

os.environ[SIMULATE] = "1"

DTYPES = {
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}
TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "float16": 5e-3, "bfloat16": 2e-2}
ORDERS = (None, "reverse", 0)
"""In which blocks and threads run; 0 is the seed of another one."""


def error(found, expected):
    """The largest, relative to the largest number."""
    found, expected = (np.asarray(x, np.float64) for x in (found, expected))
    assert found.shape == expected.shape
    return np.max(np.abs(found - expected), initial=0) / max(np.max(np.abs(expected), initial=0), 1)
