"""LASER by Pallas kernels against the definition, interpreted; values close and far apart."""

import numpy as np
import pytest

pytest.importorskip("jax")

import precondattn as pa
from precondattn_pallas.softmax.laser import LaserKernels
from tests.backends.pallas.tiles import BOUNDS, check, frame_of

KERNELS = LaserKernels(interpret=True)


def problem(t, s, h=4, n=2, d=12, e=20, b=2, apart=1.0):
    rng = np.random.default_rng(t)
    x = {
        "q": rng.normal(size=(b, t, h, d)),
        "k": rng.normal(size=(b, s, n, d)),
        "v": apart * rng.normal(size=(b, s, n, e)),
    }
    return x, rng.normal(size=(b, t, h, e))


@pytest.mark.parametrize(
    ("options", "t", "s", "masks", "dtype", "apart"),
    [
        ({}, 65, 65, {}, "float32", 1.0),
        ({}, 40, 40, {}, "bfloat16", 0.1),
        ({"causal": False}, 31, 63, {}, "float16", 3.0),
        ({}, 33, 50, {"lengths": (50, 3)}, "float32", 1.0),
        ({"window": 9}, 33, 33, {"segments": (20, 9)}, "float32", 100.0),
        ({}, 20, 20, {"lengths": (20, 0)}, "float32", 100.0),
    ],
)
def test_every_mask_with_values_close_and_far_apart(options, t, s, masks, dtype, apart):
    x, cotangent = problem(t, s, apart=apart)
    frame = frame_of(t, s, 2, **masks)
    leaf = pa.parse("laser").program.leaves[0]
    leaf = pa.Softmax(read=leaf.read, **options)
    check(KERNELS, leaf, x, cotangent, frame, dtype, BOUNDS[dtype])


@pytest.mark.parametrize("masks", [{"lengths": (20, 7)}, {"segments": (3, 7)}], ids=str)
@pytest.mark.parametrize("apart", [0.0, 100.0])
def test_outputs_of_0_beside_large_values(apart, masks):
    """Padded queries have an output of 0, far from values that differ between segments."""
    t = 20
    x, cotangent = problem(t, t)
    height = 100 + apart * (np.arange(t) // 7 % 2)
    x["v"] = x["v"] + height[:, None, None]
    leaf = pa.parse("laser").program.leaves[0]
    check(KERNELS, leaf, x, cotangent, frame_of(t, t, 2, **masks), "float32", 5e-5)
