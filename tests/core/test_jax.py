"""JAX: eager, jit, grad and vmap; another backend goes through `jax.custom_vjp`."""

from functools import partial

import numpy as np
import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp

import precondattn as pa
from precondattn.dispatch.discovery import REFERENCE
from precondattn_conformance.inputs import CallLayout, make_inputs


def arrays_of(expression, **sizes):
    made = make_inputs(pa.parse(expression), CallLayout("test", **sizes), "clustered")
    return {name: jnp.asarray(array) for name, array in made.items()}


def close(result, expected):
    np.testing.assert_allclose(np.asarray(result), np.asarray(expected), rtol=1e-10, atol=1e-12)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "expression",
    ["softmax", "lucid", "lucid[normalize=rows]", "lucid(laser)", "gated_delta", "ccq(gla)", "gsa"],
)
def test_jit_grad_and_vmap_agree_with_eager_calls(expression):
    m, x = pa.parse(expression), arrays_of(expression)
    expected, pullback = m.vjp(**x)
    close(jax.jit(lambda x: m(**x))(x), expected)
    result = jax.jit(jax.grad(lambda x: jnp.sum(m(**x))))(x)
    for name, gradient in pullback(jnp.ones_like(expected)).items():
        close(result[name], gradient)
    stacked = {name: jnp.stack([a, a + 0.1]) for name, a in x.items()}
    mapped = jax.vmap(lambda x: m(**x))(stacked)
    close(mapped[0], expected)


@pytest.mark.parametrize(
    "expression",
    ["softmax", "lucid(laser)", "path", "gsa", "ccq[covariance=query_weighted](linear)"],
)
def test_rows_without_a_visible_key_have_no_gradient_under_jit(expression):
    """XLA reorders operations, which must not lead to 0 · ∞."""
    m, x = pa.parse(expression), arrays_of(expression)
    loss = jax.grad(lambda x: jnp.sum(m(**x, lengths=jnp.asarray([4, 0])) ** 2))
    result, expected = jax.jit(loss)(x), loss(x)
    for name in x:
        close(result[name], expected[name])


def test_a_mechanism_is_a_static_argument_of_jit():
    x = arrays_of("lucid")
    run = jax.jit(lambda m, x: m(**x), static_argnums=0)
    close(run(pa.Lucid(), x), pa.Lucid()(**x))


def test_masks_may_be_traced():
    x = arrays_of("lucid")
    lengths = jnp.asarray([3, 7])
    run = jax.jit(lambda x, lengths: pa.Lucid()(**x, lengths=lengths))
    close(run(x, lengths), pa.Lucid()(**x, lengths=lengths))


def test_a_cache_is_a_pytree_that_jit_carries_and_may_donate():
    m, x = pa.Lucid(), arrays_of("lucid")
    expected = m(**x)
    step = jax.jit(lambda cache, x: m.extend(cache, **x))
    cache = m.init_cache(**x, capacity=8)
    assert len(jax.tree.leaves(cache)) == 4
    outs = []
    for i in range(7):
        out, cache = step(cache, {name: a[:, i : i + 1] for name, a in x.items()})
        outs.append(out)
    close(jnp.concatenate(outs, axis=1), expected)
    assert step._cache_size() == 1

    def scanned(cache, token):
        out, cache = m.extend(cache, **{n: a[:, None] for n, a in token.items()})
        return cache, out[:, 0]

    tokens = {name: jnp.moveaxis(a, 1, 0) for name, a in x.items()}
    _, outs = jax.lax.scan(scanned, m.init_cache(**x, capacity=8), tokens)
    close(jnp.moveaxis(outs, 0, 1), expected)


@pytest.mark.thorough
def test_the_reference_has_forward_mode_and_second_derivatives():
    m, x = pa.Lucid(pa.Laser()), arrays_of("lucid(laser)", b=1, t=3, s=3)
    call = partial(m, backend="reference")
    _, moved = jax.jvp(lambda x: call(**x), (x,), (jax.tree.map(jnp.ones_like, x),))
    assert np.isfinite(moved).all()

    def loss(k):
        return jnp.sum(call(x["q"], k, x["v"]) ** 2)

    hessian = jax.jit(jax.hessian(loss))(x["k"]).reshape(x["k"].size, -1)
    close(hessian, hessian.T)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision_is_computed_in_float32_and_returned_in_the_input_dtype(dtype):
    x = {name: array.astype(dtype) for name, array in arrays_of("lucid").items()}
    out = pa.Lucid()(**x)
    wide = pa.Lucid()(**{name: array.astype(jnp.float32) for name, array in x.items()})
    assert out.dtype == dtype
    np.testing.assert_array_equal(np.asarray(out), np.asarray(wide.astype(dtype)))


def without_derivatives(method):
    """A method as a function that JAX refuses to differentiate."""
    function = jax.custom_jvp(lambda *arrays: method(*arrays))

    @function.defjvp
    def refused(primals, tangents):
        raise AssertionError("the derivative of a kernel was asked for")

    return function


class RunnerOfSteps(pa.Runner):
    """Steps of linear attention, and their gradients."""

    def __init__(self, reference):
        self.step = without_derivatives(reference.step)
        self.step_backward = without_derivatives(reference.step_backward)


class KernelsOfSteps(pa.Backend):
    name = "kernels_of_steps"
    masks_pairs = wide_values = True

    def prepare(self, piece, request):
        is_step = request.verb.startswith("extend") and isinstance(piece, pa.Linear)
        return RunnerOfSteps(REFERENCE.prepare(piece, request)) if is_step else "has no kernel"


@pytest.fixture
def kernels_of_steps():
    backend = KernelsOfSteps()
    pa.register_backend(backend)
    yield backend
    pa.unregister_backend(backend.name)


class TestAnotherBackendInJax:
    """The out-of-tree backend claims lucid_solve."""

    @pytest.mark.thorough(but=("masks1",))
    @pytest.mark.parametrize("masks", [{}, {"lengths": jnp.asarray([4, 7])}])
    def test_its_gradient_is_the_one_that_jax_uses(self, third_party, masks):
        m, x = pa.Lucid(pa.Laser()), arrays_of("lucid(laser)")

        def loss(x, backend=None):
            return jnp.sum(m(**x, **masks, backend=backend) ** 2)

        result = jax.jit(jax.grad(loss))(x)
        assert "backward of lucid_solve" in third_party.calls
        expected = jax.grad(partial(loss, backend="reference"))(x)
        for name in x:
            close(result[name], expected[name])

    def test_vmap(self, third_party):
        m, x = pa.Lucid(pa.Laser()), arrays_of("lucid(laser)")
        stack = jnp.stack([x["k"], 2 * x["k"] + 1])
        mapped = jax.vmap(lambda k: m(x["q"], k, x["v"]))(stack)
        close(mapped[1], m(x["q"], stack[1], x["v"]))

    def test_its_gradient_has_the_derivatives_of_the_definition(self, third_party, monkeypatch):
        """Its own operations may be kernels, which JAX can not differentiate."""
        x = arrays_of("lucid_solve", b=1, t=3, s=3)
        for name in ("forward", "backward"):
            method = getattr(third_party.ThirdParty, name)

            def computed(*arguments, method=method):
                return without_derivatives(partial(method, *arguments[:2]))(*arguments[2:])

            monkeypatch.setattr(third_party.ThirdParty, name, computed)

        def products(k, backend=None):
            def loss(k):
                return jnp.sum(pa.LucidSolve()(k, x["v"], backend=backend) ** 2)

            along = jax.jvp(jax.grad(loss), (k,), (x["k"],))[1]
            return along, jax.grad(lambda k: jnp.vdot(jax.grad(loss)(k), x["k"]))(k)

        expected = jax.jit(partial(products, backend="reference"))(x["k"])
        for result, each in zip(jax.jit(products)(x["k"]), expected, strict=True):
            close(result, each)
        assert "backward of lucid_solve" in third_party.calls

    def test_the_gradient_of_its_steps_of_states_can_be_differentiated(self, kernels_of_steps):
        m, x = pa.Linear(), arrays_of("linear", b=1, t=2, s=2)
        cache = m.init_cache(**x)

        def products(x, backend):
            def loss(x):
                out, after = m.extend(cache, **x, backend=backend)
                return jnp.sum(out**2) + sum(jnp.sum(b**2) for b in after.store.values())

            along = jax.jvp(jax.grad(loss), (x,), (x,))[1]
            return along, jax.grad(lambda x: jnp.vdot(jax.grad(loss)(x)["k"], x["k"]))(x)

        expected = jax.jit(partial(products, backend="reference"))(x)
        result = jax.jit(partial(products, backend=kernels_of_steps.name))(x)
        for one, other in zip(*map(jax.tree.leaves, (result, expected)), strict=True):
            close(one, other)

    def test_forward_mode_is_refused(self, third_party):
        x = arrays_of("lucid")
        with pytest.raises(TypeError, match="forward-mode"):
            jax.jvp(lambda k: pa.Lucid()(x["q"], k, x["v"]), (x["k"],), (x["k"],))


def lines_of_gradient(expression, tokens, backend):
    """The number of lines of the printed trace of the gradient."""
    m = pa.parse(expression)
    x = arrays_of(expression, b=1, t=tokens, s=tokens, h=2, n=2, d=4, e=4)
    traced = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(m(**x, backend=backend))))(x)
    return str(traced).count("\n")


@pytest.mark.parametrize("expression", ["gsa", "ccq(gated_delta)", "hedgehog(gla)"])
def test_a_recurrence_is_traced_as_one_step_however_long(expression):
    """Unrolled, 2,000 tokens would be tens of thousands of equations."""
    assert lines_of_gradient(expression, 2000, "reference") < 3000
    long, longer = (lines_of_gradient(expression, tokens, "jax") for tokens in (2000, 8000))
    assert abs(longer - long) < 0.02 * long


def test_a_constant_beside_traced_inputs():
    q, k, v = jnp.ones((3, 1, 5, 2, 4))
    for m in (pa.Lucid(), pa.Linear()):
        out = jax.jit(lambda v, m=m: m(q, k, v))(v)
        np.testing.assert_allclose(out, m(q, k, v), atol=1e-6)
