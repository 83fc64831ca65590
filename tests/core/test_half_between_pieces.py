"""Half precision between pieces that are kernels: cotangents beyond the range of float16."""

import numpy as np
import pytest

import precondattn as pa
from precondattn.arrays import cast, dtype_name
from precondattn.dispatch.discovery import REFERENCE
from precondattn_conformance.inputs import CallLayout, make_inputs
from precondattn_conformance.libraries import named


class HalfRunner(pa.Runner):
    """A leaf as kernels for half precision compute it: all arrays are in the call's dtype."""

    def __init__(self, reference):
        self.reference = reference

    def forward(self, inputs, frame):
        dtype = inputs["v"].dtype
        assert {array.dtype for array in inputs.values()} == {dtype}
        return cast(self.reference.forward(inputs, frame)[0], dtype), ()

    def backward(self, inputs, frame, out, residuals, cotangent):
        dtype = inputs["v"].dtype
        assert {array.dtype for array in (*inputs.values(), out, cotangent)} == {dtype}
        gradients = self.reference.backward(inputs, frame, out, (), cotangent)
        return {name: cast(gradient, dtype) for name, gradient in gradients.items()}

    def step(self, past, inputs, frame):
        dtype = inputs["v"].dtype
        assert {array.dtype for array in inputs.values()} == {dtype}
        out, updates = self.reference.step(past, inputs, frame)
        return cast(out, dtype), updates

    def step_backward(self, past, inputs, frame, cotangent, d_buffers):
        dtype = inputs["v"].dtype
        assert {array.dtype for array in (*inputs.values(), cotangent)} == {dtype}
        gradients, d_past = self.reference.step_backward(past, inputs, frame, cotangent, d_buffers)
        return {name: cast(gradient, dtype) for name, gradient in gradients.items()}, d_past

    def residual_shapes(self, inputs, frame):
        return ()


class HalfKernels(pa.Backend):
    name = "kernels"

    def prepare(self, piece, request):
        is_step = request.verb.startswith("extend")
        is_supported = isinstance(piece, pa.Linear if is_step else pa.Softmax)
        return HalfRunner(REFERENCE.prepare(piece, request)) if is_supported else "has no kernel"


@pytest.fixture
def kernels():
    backend = HalfKernels()
    pa.register_backend(backend)
    yield
    pa.unregister_backend(backend.name)


def with_zero_rows(m, library):
    """Inputs in float16 whose first three values are 0, and so are the first three outputs."""
    x = make_inputs(m, CallLayout("zeros"), "random")
    x["v"][:, :3] = 0
    return {name: library.array(array, "float16") for name, array in x.items()}


@pytest.mark.parametrize("by", ["vjp", "autograd"])
@pytest.mark.parametrize(
    ("expression", "library"),
    [
        ("row_normalized", "torch"),
        ("row_normalized[detach=false]", "torch"),
        ("row_normalized(linear)", "torch"),
        ("row_normalized[detach=false]", "jax"),
        pytest.param("row_normalized(linear)", "jax", marks=pytest.mark.thorough),
    ],
)
def test_rows_of_zeros_have_finite_gradients_in_float16(expression, library, by, kernels):
    """Of a call, and of a step if the mechanism has states."""
    pytest.importorskip(library)
    library, m, backend = named(library), pa.parse(expression), ("kernels", "reference")
    x = make_inputs(m, CallLayout("zeros"), "random")
    x["v"][:, :3] = 0  # So are the first three outputs.
    x = {name: library.array(array, "float16") for name, array in x.items()}
    exact = {name: library.numpy(array) for name, array in x.items()}
    is_step = "linear" in expression
    cache, empty = (m.init_cache(**a) if is_step else None for a in (x, exact))

    def call(x, cache, backend=backend):
        return m.extend(cache, **x, backend=backend)[0] if is_step else m(**x, backend=backend)

    def pulled(x, cache, backend, cotangent):
        if is_step:
            return m.extend_vjp(cache, **x, backend=backend)[2](cotangent)[0]
        return m.vjp(**x, backend=backend)[1](cotangent)

    out = call(exact, empty, "reference")
    cotangent = library.array(np.random.default_rng(1).normal(size=out.shape), "float16")
    expected = pulled(exact, empty, "reference", library.numpy(cotangent))
    named_cache = {"cache": cache} if is_step else {}
    assert "kernels" in m.explain(**x, **named_cache, backend=backend, verb="vjp").backends
    if by == "vjp":
        gradients = pulled(x, cache, backend, cotangent)
    else:
        gradients = library.gradients(lambda x: call(x, cache), x, cotangent)
    for name in ("q", "k"):
        assert dtype_name(gradients[name]) == "float16"
        size = np.abs(expected[name]).max()
        assert np.abs(library.numpy(gradients[name]) - expected[name]).max() < 5e-3 * size, name
    # The gradient of the first values is beyond float16.
    found = library.numpy(gradients["v"])
    is_beyond = np.abs(expected["v"]) > 65504
    assert is_beyond.any()
    assert not np.isnan(found).any()
    np.testing.assert_array_equal(np.isinf(found), is_beyond)
