"""Shared by tests of the CuPy backend's attention: calls of its kernels and of the definition."""

import numpy as np
import pytest

import precondattn as pa
from precondattn.backend import ArraySpec
from precondattn.frame import full_frame
from precondattn_cupy import layout
from precondattn_cupy.configurations import Configuration, forced
from precondattn_cupy.softmax import attention, laser
from precondattn_cupy.softmax import leaf as softmax
from precondattn_cupy.softmax import step as softmax_step
from precondattn_kernel_tools.cuda_simulator import checked
from tests.backends.cupy.simulated import DTYPES, TOLERANCES, error

TILES = (
    *("softmax_forward", "softmax_query_gradient", "softmax_key_gradient"),
    *(f"softmax_{kernel}_of_two" for kernel in ("forward", "query_gradient", "key_gradient")),
)
SMALL = dict.fromkeys(TILES, Configuration(16, 16))
KERNELS = {"mean": softmax.SoftmaxKernels, "log_mean_exp": laser.LaserKernels}
"""The kernels' class for each read of the leaf."""
SOFTMAX = pa.Softmax()


@pytest.fixture
def unwritten_is_nan(monkeypatch):
    def empty(like, shape, dtype=None):
        array = np.empty(shape, like.dtype if dtype is None else dtype)
        array.fill(-1 if array.dtype.kind in "iu" else np.nan)
        return array

    for module in (layout, attention, softmax, softmax_step, laser):
        monkeypatch.setattr(module, "empty", empty)


def problem(t, s=None, *, b=2, h=2, n=1, d=16, e=16, dtype="float32", spread=1.0):
    """Inputs and a cotangent; with a `spread` of 100 the values of a channel are far apart."""
    s = s or t
    rng = np.random.default_rng(t)

    def normal(*shape, times=1.0):
        return (rng.standard_normal(shape) * times).astype(DTYPES[dtype])

    v = normal(b, s, n, e, times=spread)
    x = {"q": normal(b, t, h, d), "k": normal(b, s, n, d), "v": v}
    return x, normal(b, t, h, e)


def run_kernels(x, d_out, *, leaf=SOFTMAX, order=None, tiles=SMALL, **masks):
    """Output and gradients of the kernels."""
    frame = full_frame(x["q"].shape[1], x["k"].shape[1], x["q"], **masks)
    kernels = KERNELS[leaf.read.name]()
    with forced(**tiles), checked(order):
        out, residuals = kernels.forward(leaf, x, frame)
        gradients = kernels.backward(leaf, x, frame, out, residuals, d_out)
    specs = {name: ArraySpec(a.shape, str(a.dtype)) for name, a in x.items()}
    shapes = tuple(ArraySpec(r.shape, str(r.dtype)) for r in residuals)
    assert shapes == kernels.residual_shapes(leaf, specs)
    return {"out": out, **gradients, "residuals": residuals}


def expected(x, d_out, *, leaf=SOFTMAX, **masks):
    """Output and gradients of the definition, in float64."""
    x = {name: a.astype(np.float64) for name, a in x.items()}
    with pa.use_backend("reference"):
        out, pullback = leaf.vjp(**x, **masks)
        return {"out": out, **pullback(d_out.astype(np.float64))}


def check(x, d_out, *, bound=None, gradient_bound=None, **options):
    """The kernels agree with the definition, and write to none of the inputs."""
    bound = bound or TOLERANCES[str(x["v"].dtype)]
    before = {name: a.tobytes() for name, a in x.items()}
    ours = run_kernels(x, d_out, **options)
    for kept in ("tiles", "order"):
        options.pop(kept, None)
    for name, wanted in expected(x, d_out, **options).items():
        assert ours[name].dtype == x["v"].dtype
        limit = bound if name == "out" else gradient_bound or bound
        assert error(ours[name], wanted) < limit, name
    for name, array in x.items():
        assert array.tobytes() == before[name]
    return ours


def with_nan(array, is_masked):
    """The array with NaN at masked tokens (b, t)."""
    return np.where(is_masked[:, :, None, None], np.asarray(np.nan, array.dtype), array)
