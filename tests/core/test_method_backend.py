"""Backends by the contract: differentiable code, methods that get the piece, half precision.

A backend of the framework's differentiable calls needs no method for a gradient. Packages whose
methods get the piece run as they were written; `tests/third_party/packages_with_methods` has two.
Cotangents between pieces that are kernels may be beyond the range of float16.
"""

import sys
from pathlib import Path

import numpy as np
import pytest

import precondattn as pa
from precondattn.arrays import cast, dtype_name
from precondattn.dispatch.discovery import REFERENCE, discover
from precondattn.runner import LeafRunner
from precondattn_conformance import replay
from precondattn_conformance.cases import cases
from precondattn_conformance.libraries import named
from precondattn_conformance.runner import Report, run_case
from precondattn_conformance.status import FAILED, PASSED
from tests.core.inputs import inputs_of

PACKAGES = Path(__file__).parents[1] / "third_party" / "packages_with_methods"
BACKENDS = {"lucid_solve": "methods-lucid-solve", "gated_delta": "methods-gated-delta"}


@pytest.fixture
def packages(only_the_reference, monkeypatch):
    """The packages, installed for one test."""
    monkeypatch.syspath_prepend(str(PACKAGES))
    yield
    for name in [name for name in sys.modules if name.startswith("methods_")]:
        del sys.modules[name]


@pytest.mark.parametrize("mechanism", BACKENDS)
def test_such_a_package_conforms(packages, mechanism):
    pytest.importorskip("torch")
    chosen = {"only_libraries": ("torch",), "only_mechanisms": (mechanism,)}
    outcomes = [run_case(case, BACKENDS[mechanism]) for case in cases("smoke", **chosen)]
    report = Report(outcomes)
    assert report.count(FAILED) == 0, [str(o) for o in outcomes if o.status == FAILED]
    assert report.count(PASSED) > 20


@pytest.mark.parametrize("mechanism", BACKENDS)
def test_autograd_calls_its_backward(packages, mechanism, monkeypatch):
    torch = pytest.importorskip("torch")
    m, backend = pa.parse(mechanism), BACKENDS[mechanism]
    methods = discover().named(backend).methods
    called, backward = [], methods.backward
    monkeypatch.setattr(
        methods, "backward", lambda *arrays: called.append(mechanism) or backward(*arrays)
    )

    def gradients(backend):
        x = inputs_of(m, "torch", t=5, requires_grad=True)
        return torch.autograd.grad(m(**x, backend=backend).square().sum(), list(x.values()))

    torch.testing.assert_close(gradients(backend), gradients("reference"))
    assert called == [mechanism]


def test_its_data_are_those_of_the_class_and_the_defaults(packages):
    backend = discover().named("methods-lucid-solve")
    assert backend.libraries == {"torch"}
    assert backend.covers == {"lucid_solve"}
    assert backend.memory == "linear"
    assert backend.promises == pa.CONVENTIONS
    backend.methods.preference = 3
    assert backend.preference == 3


class LoopRunner(pa.DifferentiableRunner):
    """Gated linear attention by the reference's differentiable code."""

    def __init__(self, reference):
        self.reference = reference

    def forward(self, inputs, frame):
        return self.reference.forward(inputs, frame)[0], ()

    def step(self, past, inputs, frame):
        return self.reference.step(past, inputs, frame)


class RunnerWithoutGradient(pa.Runner):
    """The same in calls that autograd does not see through, and without a gradient."""

    __init__, forward, step = LoopRunner.__init__, LoopRunner.forward, LoopRunner.step


class Loop(pa.Backend):
    name, runner = "loop", LoopRunner

    def prepare(self, piece, request):
        if piece != pa.GLA() or request.masks:
            return "does gla with its default options, without masks"
        return self.runner(REFERENCE.prepare(piece, request))


class Kernel(Loop):
    name, runner = "kernel", RunnerWithoutGradient


class LoopWithMethods(pa.Backend):
    """The same as a class whose methods get the piece."""

    name = "loop_with_methods"

    def supports(self, mechanism, request):
        reason = Loop().prepare(mechanism, request)
        no = pa.Support.no(reason)
        return no if isinstance(reason, str) else pa.Support.yes(differentiable=True)

    def forward(self, mechanism, *arguments):
        return LeafRunner(mechanism, mechanism).forward(*arguments)[0], ()

    def step(self, mechanism, *arguments):
        return LeafRunner(mechanism, mechanism).step(*arguments)


@pytest.fixture
def registered(only_the_reference):
    pa.register_backend(Loop)
    pa.register_backend(Kernel)
    pa.register_backend(LoopWithMethods)


@pytest.mark.parametrize(
    ("library", "check", "dtype", "backend"),
    [
        ("torch", "gradients", "float64", "loop"),
        ("torch", "gradients", "float64", "loop_with_methods"),
        ("torch", "states", "float64", "loop_with_methods"),
        ("torch", "states", "float16", "loop"),
        ("jax", "gradients", "float64", "loop"),
        ("jax", "states", "float16", "loop_with_methods"),
    ],
)
def test_its_gradients_are_the_definitions(library, check, dtype, backend, registered):
    pytest.importorskip(library)
    kind = "random" if check == "states" else "clustered"
    outcome = replay(f"{check}-{library}-{dtype}-plain-{kind}-gla", backend=backend)
    assert outcome.startswith("passed"), outcome


def test_torch_vmap_maps_its_pullbacks(registered):
    torch = pytest.importorskip("torch")
    m, x = pa.GLA(), inputs_of("gla", "torch", t=5)
    _, cache = m.extend(m.init_cache(**x), **x)

    def gradients(w, backend="loop"):
        out, longer, pullback = m.extend_vjp(cache, **x, backend=backend)
        full, pulled = m.vjp(**x, backend=backend)
        return pullback(w * out, dict(longer.store)), pulled(w * full)

    weights = torch.rand(2, *m(**x).shape, dtype=torch.float64)
    expected = torch.vmap(lambda w: gradients(w, "reference"))(weights)
    torch.testing.assert_close(torch.vmap(gradients)(weights), expected)


def test_its_pullback_is_differentiable(registered):
    torch = pytest.importorskip("torch")

    def second(backend):
        x = inputs_of("gla", "torch", t=5, requires_grad=True)
        out, pullback = pa.GLA().vjp(**x, backend=backend)
        loss = sum(gradient.square().sum() for gradient in pullback(out).values())
        return torch.autograd.grad(loss, list(x.values()))

    torch.testing.assert_close(second("loop"), second("reference"))


def test_what_autograd_has_not_recorded_is_an_error(registered):
    class DetachedRunner(LoopRunner):
        def forward(self, inputs, frame):
            return super().forward(inputs, frame)[0].detach(), ()

    class Detached(Loop):
        name, runner = "detached", DetachedRunner

    pa.register_backend(Detached)
    out, pullback = pa.GLA().vjp(**inputs_of("gla", "torch", t=5), backend="detached")
    with pytest.raises(RuntimeError, match="does not depend on its arguments"):
        pullback(out)


@pytest.mark.parametrize(("backend", "library"), [("kernel", "torch"), ("loop", "numpy")])
def test_without_autograd_a_backend_has_to_define_its_gradient(backend, library, registered):
    x = inputs_of("gla", library, t=5)
    out, pullback = pa.GLA().vjp(**x, backend=backend)
    with pytest.raises(NotImplementedError, match="needs the method 'backward'"):
        pullback(out)
    out, cache, pullback = pa.GLA().extend_vjp(pa.GLA().init_cache(**x), **x, backend=backend)
    with pytest.raises(NotImplementedError, match="needs the method 'step_backward'"):
        pullback(out, dict(cache.store))


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
