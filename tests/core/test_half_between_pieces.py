"""Half precision between pieces that are kernels: cotangents beyond the range of float16."""

import numpy as np
import pytest

import precondattn as pa
from precondattn.arrays import cast, dtype_name
from precondattn.dispatch.discovery import REFERENCE
from precondattn_conformance.libraries import named
from tests.core.inputs import inputs_of


class HalfRunner(pa.Runner):
    """A leaf as kernels for half precision compute it: all arrays are in the call's dtype."""

    def __init__(self, reference):
        self.reference = reference

    def narrow(self, inputs, result, *others):
        """The result in the call's dtype, which that of all arrays has to be."""
        dtype = inputs["v"].dtype
        assert {array.dtype for array in (*inputs.values(), *others)} == {dtype}
        if isinstance(result, dict):
            return {name: cast(array, dtype) for name, array in result.items()}
        return cast(result, dtype)

    def forward(self, inputs, frame):
        return self.narrow(inputs, self.reference.forward(inputs, frame)[0]), ()

    def backward(self, inputs, frame, out, residuals, cotangent):
        gradients = self.reference.backward(inputs, frame, out, (), cotangent)
        return self.narrow(inputs, gradients, out, cotangent)

    def step(self, past, inputs, frame):
        out, updates = self.reference.step(past, inputs, frame)
        return self.narrow(inputs, out), updates

    def step_backward(self, past, inputs, frame, cotangent, d_buffers):
        gradients, d_past = self.reference.step_backward(past, inputs, frame, cotangent, d_buffers)
        return self.narrow(inputs, gradients, cotangent), d_past

    def residual_shapes(self, inputs, frame):
        return ()


class HalfKernels(pa.Backend):
    name = "kernels"

    def prepare(self, piece, request):
        is_step = request.verb.startswith("extend")
        is_supported = isinstance(piece, pa.Linear if is_step else pa.Softmax)
        return HalfRunner(REFERENCE.prepare(piece, request)) if is_supported else "has no kernel"


@pytest.mark.parametrize(
    ("expression", "library", "by"),
    [
        ("row_normalized", "torch", "vjp"),
        ("row_normalized[detach=false]", "torch", "autograd"),
        ("row_normalized(linear)", "torch", "vjp"),
        ("row_normalized(linear)", "torch", "autograd"),
        ("row_normalized[detach=false]", "jax", "vjp"),
        pytest.param("row_normalized(linear)", "jax", "autograd", marks=pytest.mark.thorough),
    ],
)
def test_rows_of_zeros_have_finite_gradients_in_float16(expression, library, by, register):
    """Of a call, and of a step if the mechanism has states."""
    pytest.importorskip(library)
    register(HalfKernels())
    library, m, kernels = named(library), pa.parse(expression), ("kernels", "reference")
    x = inputs_of(m)
    x["v"][:, :3] = 0  # So are the first three outputs.
    x = {name: library.array(array, "float16") for name, array in x.items()}
    exact = {name: library.numpy(array) for name, array in x.items()}
    is_step = "linear" in expression

    def pulled(x, backend):
        if is_step:
            out, _, pull = m.extend_vjp(m.init_cache(**x), **x, backend=backend)
            return out, lambda d: pull(d)[0]
        return m.vjp(**x, backend=backend)

    def call(x):
        return (
            m.extend(m.init_cache(**x), **x, backend=kernels)[0]
            if is_step
            else m(**x, backend=kernels)
        )

    out, pullback = pulled(exact, "reference")
    cotangent = library.array(np.random.default_rng(1).normal(size=out.shape), "float16")
    expected = pullback(library.numpy(cotangent))
    cache = {"cache": m.init_cache(**x)} if is_step else {}
    assert "kernels" in m.explain(**x, **cache, backend=kernels, verb="vjp").backends
    if by == "vjp":
        gradients = pulled(x, kernels)[1](cotangent)
    else:
        gradients = library.gradients(call, x, cotangent)
    for name in ("q", "k"):
        assert dtype_name(gradients[name]) == "float16"
        size = np.abs(expected[name]).max()
        assert np.abs(library.numpy(gradients[name]) - expected[name]).max() < 5e-3 * size, name
    # The gradient of the first values is beyond float16.
    found, is_beyond = library.numpy(gradients["v"]), np.abs(expected["v"]) > 65504
    assert is_beyond.any()
    assert not np.isnan(found).any()
    np.testing.assert_array_equal(np.isinf(found), is_beyond)
