"""A backend of the framework's differentiable calls needs no method for a gradient."""

import pytest

import precondattn as pa
from precondattn.dispatch.discovery import REFERENCE
from precondattn.runner import LeafRunner
from precondattn_conformance import replay
from tests.core.inputs import inputs_of


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


@pytest.fixture(autouse=True)
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
def test_its_gradients_are_the_definitions(library, check, dtype, backend):
    pytest.importorskip(library)
    kind = "random" if check == "states" else "clustered"
    outcome = replay(f"{check}-{library}-{dtype}-plain-{kind}-gla", backend=backend)
    assert outcome.startswith("passed"), outcome


def test_torch_vmap_maps_its_pullbacks():
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


def test_its_pullback_is_differentiable():
    torch = pytest.importorskip("torch")

    def second(backend):
        x = inputs_of("gla", "torch", t=5, requires_grad=True)
        out, pullback = pa.GLA().vjp(**x, backend=backend)
        loss = sum(gradient.square().sum() for gradient in pullback(out).values())
        return torch.autograd.grad(loss, list(x.values()))

    torch.testing.assert_close(second("loop"), second("reference"))


def test_what_autograd_has_not_recorded_is_an_error():
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
def test_without_autograd_a_backend_has_to_define_its_gradient(backend, library):
    x = inputs_of("gla", library, t=5)
    out, pullback = pa.GLA().vjp(**x, backend=backend)
    with pytest.raises(NotImplementedError, match="needs the method 'backward'"):
        pullback(out)
    out, cache, pullback = pa.GLA().extend_vjp(pa.GLA().init_cache(**x), **x, backend=backend)
    with pytest.raises(NotImplementedError, match="needs the method 'step_backward'"):
        pullback(out, dict(cache.store))
