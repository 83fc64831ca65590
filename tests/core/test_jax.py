"""JAX: eager, jit, grad and vmap; another backend goes through `jax.custom_vjp`."""

import os
import subprocess
import sys
from functools import partial

import numpy as np
import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp

import precondattn as pa
from precondattn.dispatch.discovery import REFERENCE
from precondattn.frameworks.jax.derivative import with_derivative
from precondattn_conformance.inputs import CallLayout, make_inputs


def arrays_of(expression, **sizes):
    made = make_inputs(pa.parse(expression), CallLayout("test", **sizes), "clustered")
    return {name: jnp.asarray(array) for name, array in made.items()}


def close(result, expected):
    for one, other in zip(*map(jax.tree.leaves, (result, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "expression",
    ["softmax", "lucid(laser)", "path", "gsa", "ccq[covariance=query_weighted](linear)"],
)
def test_rows_without_a_visible_key_have_no_gradient_under_jit(expression):
    """XLA reorders operations, which must not lead to 0 · ∞. Lengths may be traced."""
    m, x = pa.parse(expression), arrays_of(expression)
    loss = jax.grad(lambda x, lengths: jnp.sum(m(**x, lengths=lengths) ** 2))
    lengths = jnp.asarray([4, 0])
    close(jax.jit(loss)(x, lengths), loss(x, lengths))


@pytest.mark.thorough
@pytest.mark.parametrize("expression", ["softmax", "lucid[normalize=rows]", "ccq(gla)", "gsa"])
def test_a_mapped_call_is_made_one_after_another(expression):
    m, x = pa.parse(expression), arrays_of(expression)
    other = jax.tree.map(lambda a: a[::-1], x)
    mapped = jax.vmap(lambda x: m(**x))(jax.tree.map(lambda *a: jnp.stack(a), x, other))
    close(mapped, jnp.stack([m(**x), m(**other)]))


def test_a_mechanism_is_a_static_argument_and_arrays_may_be_constants():
    x = arrays_of("lucid")
    run = jax.jit(lambda m, v: m(**x | {"v": v}), static_argnums=0)
    for m in (pa.Lucid(), pa.Linear()):
        close(run(m, x["v"]), m(**x))


def test_a_cache_is_a_pytree_that_jit_carries_and_may_donate():
    m, x = pa.Lucid(), arrays_of("lucid")
    expected = m(**x)
    step = jax.jit(lambda cache, x: m.extend(cache, **x))
    cache, outs = m.init_cache(**x, capacity=8), []
    assert len(jax.tree.leaves(cache)) == 4
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
    x = arrays_of("lucid(laser)", b=1, t=3, s=3)
    call = partial(pa.Lucid(pa.Laser()), backend="reference")
    _, moved = jax.jvp(lambda x: call(**x), (x,), (jax.tree.map(jnp.ones_like, x),))
    assert np.isfinite(moved).all()
    loss = jax.hessian(lambda k: jnp.sum(call(x["q"], k, x["v"]) ** 2))
    hessian = jax.jit(loss)(x["k"]).reshape(x["k"].size, -1)
    close(hessian, hessian.T)


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


def second_derivatives(loss, x):
    """Forward over reverse, and reverse over reverse, in the direction of x."""
    along = jax.jvp(jax.grad(loss), (x,), (x,))[1]
    pairs = partial(jax.tree.map, jnp.vdot)
    return along, jax.grad(lambda y: sum(jax.tree.leaves(pairs(jax.grad(loss)(y), x))))(x)


class TestAnotherBackendInJax:
    """The out-of-tree backend claims lucid_solve."""

    @pytest.mark.thorough(but=("masks1",))
    @pytest.mark.parametrize("masks", [{}, {"lengths": jnp.asarray([4, 7])}])
    def test_its_gradient_is_the_one_that_jax_uses(self, third_party, masks):
        m, x = pa.Lucid(pa.Laser()), arrays_of("lucid(laser)")
        loss = lambda x, backend=None: jnp.sum(m(**x, **masks, backend=backend) ** 2)  # noqa: E731
        result = jax.jit(jax.grad(loss))(x)
        assert "backward of lucid_solve" in third_party.calls
        close(result, jax.grad(partial(loss, backend="reference"))(x))

    def test_vmap_and_forward_mode(self, third_party):
        m, x = pa.Lucid(pa.Laser()), arrays_of("lucid(laser)")
        stack = jnp.stack([x["k"], 2 * x["k"] + 1])
        mapped = jax.vmap(lambda k: m(x["q"], k, x["v"]))(stack)
        close(mapped[1], m(x["q"], stack[1], x["v"]))
        with pytest.raises(TypeError, match="forward-mode"):
            jax.jvp(lambda k: m(x["q"], k, x["v"]), (x["k"],), (x["k"],))

    def test_its_gradient_has_the_derivatives_of_the_definition(self, third_party, monkeypatch):
        """Its own operations may be kernels, which JAX can not differentiate."""
        x = arrays_of("lucid_solve", b=1, t=3, s=3)
        for name in ("forward", "backward"):
            method = getattr(third_party.ThirdParty, name)

            def computed(*arguments, method=method):
                return without_derivatives(partial(method, *arguments[:2]))(*arguments[2:])

            monkeypatch.setattr(third_party.ThirdParty, name, computed)

        def products(k, backend=None):
            return second_derivatives(
                lambda k: jnp.sum(pa.LucidSolve()(k, x["v"], backend=backend) ** 2), k
            )

        expected = jax.jit(partial(products, backend="reference"))(x["k"])
        close(jax.jit(products)(x["k"]), expected)
        assert "backward of lucid_solve" in third_party.calls

    def test_the_gradient_of_steps_of_states_can_be_differentiated(self):
        m, x = pa.Linear(), arrays_of("linear", b=1, t=2, s=2)
        cache = m.init_cache(**x)

        def products(backend, x):
            def loss(x):
                out, after = m.extend(cache, **x, backend=backend)
                return jnp.sum(out**2) + sum(jnp.sum(b**2) for b in after.store.values())

            return second_derivatives(loss, x)

        pa.register_backend(KernelsOfSteps())
        try:
            found, expected = (
                jax.jit(partial(products, name))(x) for name in ("kernels_of_steps", "reference")
            )
        finally:
            pa.unregister_backend("kernels_of_steps")
        close(found, expected)


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


# -------------------------------------------------------- derivatives of one's own, and deadlocks


def tenfold(arguments):
    """sin x at index i, whose derivative is declared to be ten times the result itself."""

    def function(x, i):
        return {"of": jnp.sin(x["x"][i]), "i": i}

    def derivative(primals, tangents):
        (_, i), (d_x, _) = primals, tangents
        result = tenfold(primals)
        moved = 10.0 * result["of"] * d_x["x"][i]
        return result, {"of": moved, "i": np.zeros(i.shape, jax.dtypes.float0)}

    return with_derivative(function, derivative)(*arguments)


def at(x, i):
    return tenfold(({"x": x}, i))["of"]


def in_a_loop(x, i):
    def step(total, j):
        return total + at(x * (1.0 + 0.0 * total), j), None

    return jax.lax.scan(step, 0.0 * x[0], i)[0]


def mapped(x, i):
    return jnp.sum(jax.vmap(at, in_axes=(None, 0))(x, i))


def of_mapped_loops(x, i):
    return jnp.sum(jax.vmap(in_a_loop, in_axes=(0, None))(jnp.stack([x, x]), i)) / 2


@pytest.mark.parametrize("function", [in_a_loop, mapped, of_mapped_loops])
def test_a_derivative_is_kept_in_loops_and_maps(function):
    x, i, chosen = jnp.linspace(0.1, 0.7, 3), jnp.asarray([2, 0]), np.asarray([1.0, 0.0, 1.0])
    gradient = jax.grad(function)
    along = jax.jvp(lambda x: gradient(x, i), (x,), (x,))[1]
    again = jax.grad(lambda y: jnp.vdot(gradient(y, i), x))(x)
    for found, expected in (
        (jax.jit(function)(x, i), np.sum(chosen * np.sin(x))),
        (gradient(x, i), 10.0 * chosen * np.sin(x)),
        (along, 100.0 * chosen * np.sin(x) * x),
        (again, along),
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


TWO_STACKS = """
import os; os.sched_setaffinity(0, {cores})
from functools import partial
import jax, jax.numpy as jnp
from precondattn.frameworks.jax.solve import solve_triangular

matrices, right = jnp.eye(64) + jnp.zeros((8, 64, 64)), jnp.ones((8, 64, 4096))
solve = partial(solve_triangular, lower=True)
for mapping in (lambda f: f, jax.vmap):
    both = jax.jit(mapping(lambda a, b: (solve(a, b), solve(2 * a, b))))
    for _ in range(20):
        jax.block_until_ready(both(matrices, right))
"""
"""A program that deadlocks with JAX's own `solve` or `solve_triangular`, on two cores."""


@pytest.mark.thorough
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores can not be chosen here")
def test_solving_two_stacks_of_systems_at_once_does_not_deadlock():
    script = TWO_STACKS.format(cores=sorted(os.sched_getaffinity(0))[:2])
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
