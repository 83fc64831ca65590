"""A backend of the framework's differentiable calls needs no method for a gradient."""

import pytest

import precondattn as pa
from precondattn.arrays import cast, namespace, upcast, upcast_all
from precondattn_conformance import replay
from precondattn_conformance.inputs import CallLayout, make_inputs


class LoopRunner(pa.DifferentiableRunner):
    """Gated linear attention, token by token."""

    def forward(self, inputs, frame):
        k, v = inputs["k"], inputs["v"]
        shape = (k.shape[0], k.shape[2], k.shape[3], v.shape[3])
        return run(upcast(namespace(k).zeros(shape, dtype=k.dtype)), inputs)[0], ()

    def step(self, past, inputs, frame):
        ((name, state),) = past.items()
        out, last = run(state, inputs)
        return out, {name: pa.Replace(last)}


class RunnerWithoutGradient(pa.Runner):
    """The same in calls that autograd does not see through, and without a gradient."""

    forward, step = LoopRunner.forward, LoopRunner.step


class Loop(pa.Backend):
    name, runner = "loop", LoopRunner

    def prepare(self, piece, request):
        if piece != pa.GLA() or request.masks:
            return "does gla with its default options, without masks"
        return self.runner()


class Kernel(Loop):
    name, runner = "kernel", RunnerWithoutGradient


class LoopWithMethods(pa.Backend):
    """The same as a class whose methods get the piece."""

    name = "loop_with_methods"

    def supports(self, mechanism, request):
        reason = Loop().prepare(mechanism, request)
        no = pa.Support.no(reason)
        return no if isinstance(reason, str) else pa.Support.yes(differentiable=True)

    def forward(self, mechanism, inputs, frame):
        return LoopRunner().forward(inputs, frame)

    def step(self, mechanism, past, inputs, frame):
        return LoopRunner().step(past, inputs, frame)


def run(state, x):
    dtype, x = x["v"].dtype, upcast_all(x)
    xp, (b, t, h, d) = namespace(state), x["q"].shape
    q, outs = xp.reshape(x["q"] * d**-0.5, (b, t, state.shape[1], -1, d)), []
    for i in range(t):
        k, v, g = (x[name][:, i] for name in "kvg")
        state = xp.exp(g[..., None]) * state + k[..., None] * v[..., None, :]
        outs.append(xp.reshape(q[:, i] @ state, (b, h, -1)))
    return cast(xp.stack(outs, axis=1), dtype), state


@pytest.fixture(autouse=True)
def registered(only_the_reference):
    pa.register_backend(Loop)
    pa.register_backend(Kernel)
    pa.register_backend(LoopWithMethods)


def arrays():
    return make_inputs(pa.GLA(), CallLayout("test", t=5, s=5), "random")


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
    m, x = pa.GLA(), {name: torch.tensor(a) for name, a in arrays().items()}
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
        x = {name: torch.tensor(a, requires_grad=True) for name, a in arrays().items()}
        out, pullback = pa.GLA().vjp(**x, backend=backend)
        loss = sum(gradient.square().sum() for gradient in pullback(out).values())
        return torch.autograd.grad(loss, list(x.values()))

    torch.testing.assert_close(second("loop"), second("reference"))


def test_the_flops_of_its_gradient_are_counted():
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    x = {name: torch.tensor(a, requires_grad=True) for name, a in arrays().items()}
    with FlopCounterMode(display=False) as forward:
        out = pa.GLA()(**x, backend="loop")
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert backward.get_total_flops() == 2 * forward.get_total_flops() > 0


def test_what_autograd_has_not_recorded_is_an_error():
    torch = pytest.importorskip("torch")

    class DetachedRunner(LoopRunner):
        def forward(self, inputs, frame):
            return super().forward(inputs, frame)[0].detach(), ()

    class Detached(Loop):
        name, runner = "detached", DetachedRunner

    pa.register_backend(Detached)
    out, pullback = pa.GLA().vjp(
        **{name: torch.tensor(a) for name, a in arrays().items()}, backend="detached"
    )
    with pytest.raises(RuntimeError, match="does not depend on its arguments"):
        pullback(out)


@pytest.mark.parametrize(("backend", "library"), [("kernel", "torch"), ("loop", "numpy")])
def test_without_autograd_a_backend_has_to_define_its_gradient(backend, library):
    xp = pytest.importorskip(library)
    x = {name: xp.asarray(a) for name, a in arrays().items()}
    out, pullback = pa.GLA().vjp(**x, backend=backend)
    with pytest.raises(NotImplementedError, match="needs the method 'backward'"):
        pullback(out)
    out, cache, pullback = pa.GLA().extend_vjp(pa.GLA().init_cache(**x), **x, backend=backend)
    with pytest.raises(NotImplementedError, match="needs the method 'step_backward'"):
        pullback(out, dict(cache.store))
