"""JAX: eager, jit, grad, vmap, strict modes; another backend goes through `jax.custom_vjp`."""

import os
import subprocess
import sys
from contextlib import ExitStack
from functools import partial

import numpy as np
import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp
import pytest

import precondattn as pa
from precondattn.dispatch.discovery import REFERENCE
from precondattn.frameworks.jax.derivative import with_derivative
from precondattn_conformance.inputs import CallLayout, make_inputs
from precondattn_conformance.libraries import named
from tests.core.inputs import inputs_of

arrays_of = partial(inputs_of, library="jax", kind="clustered")


def close(result, expected):
    for one, other in zip(*map(jax.tree.leaves, (result, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.thorough(but=("path",))
@pytest.mark.parametrize("expression", ["lucid(laser)", "path", "gsa"])
def test_rows_without_a_visible_key_have_no_gradient_under_jit(expression):
    """XLA reorders operations, which must not lead to 0 · ∞. Lengths may be traced."""
    m, x = pa.parse(expression), arrays_of(expression)
    loss = jax.grad(lambda x, lengths: jnp.sum(m(**x, lengths=lengths) ** 2))
    lengths = jnp.asarray([4, 0])
    close(jax.jit(loss)(x, lengths), loss(x, lengths))


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
    x = arrays_of("lucid(laser)", b=1, t=3)
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

    def test_its_gradient_is_the_one_that_jax_uses_with_vmap_and_without_forward_mode(
        self, third_party
    ):
        m, x = pa.Lucid(), arrays_of("lucid")

        def loss(x, backend=None):
            return jnp.sum(m(**x, lengths=jnp.asarray([4, 7]), backend=backend) ** 2)

        result = jax.jit(jax.grad(loss))(x)
        assert "backward of lucid_solve" in third_party.calls
        close(result, jax.grad(partial(loss, backend="reference"))(x))
        stack = jnp.stack([x["k"], 2 * x["k"] + 1])
        mapped = jax.vmap(lambda k: m(x["q"], k, x["v"]))(stack)
        close(mapped[1], m(x["q"], stack[1], x["v"]))
        with pytest.raises(TypeError, match="forward-mode"):
            jax.jvp(lambda k: m(x["q"], k, x["v"]), (x["k"],), (x["k"],))

    def test_its_gradient_has_the_derivatives_of_the_definition(self, third_party, monkeypatch):
        """Its own operations may be kernels, which JAX can not differentiate."""
        x = arrays_of("lucid_solve", b=1, t=3)
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

    def test_the_gradient_of_steps_of_states_can_be_differentiated(self, register):
        m, x = pa.Linear(), arrays_of("linear", b=1, t=2)
        cache = m.init_cache(**x)

        def products(backend, x):
            def loss(x):
                out, after = m.extend(cache, **x, backend=backend)
                return jnp.sum(out**2) + sum(jnp.sum(b**2) for b in after.store.values())

            return second_derivatives(loss, x)

        register(KernelsOfSteps())
        names = "kernels_of_steps", "reference"
        close(*(jax.jit(partial(products, name))(x) for name in names))


def lines_of_gradient(expression, tokens, backend):
    """The number of lines of the printed trace of the gradient."""
    m = pa.parse(expression)
    x = arrays_of(expression, b=1, t=tokens, h=2, n=2, d=4, e=4)
    traced = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(m(**x, backend=backend))))(x)
    return str(traced).count("\n")


@pytest.mark.thorough(but=("ccq(gated_delta)",))
@pytest.mark.parametrize("expression", ["gsa", "ccq(gated_delta)"])
def test_a_recurrence_is_traced_as_one_step_however_long(expression):
    """Unrolled, 2,000 tokens would be tens of thousands of equations."""
    assert lines_of_gradient(expression, 2000, "reference") < 3000
    long, longer = (lines_of_gradient(expression, tokens, "jax") for tokens in (2000, 8000))
    assert abs(longer - long) < 0.02 * long


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


def mapped(x, i):
    return jnp.sum(jax.vmap(lambda i: tenfold(({"x": x}, i))["of"])(i))


def of_mapped_loops(x, i):
    def in_a_loop(x):
        def step(total, j):
            return total + tenfold(({"x": x * (1.0 + 0.0 * total)}, j))["of"], None

        return jax.lax.scan(step, 0.0 * x[0], i)[0]

    return jnp.sum(jax.vmap(in_a_loop)(jnp.stack([x, x]))) / 2


@pytest.mark.parametrize("function", [mapped, of_mapped_loops])
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


FIRST = ("softmax[window=3]", "lucid(laser)", "ccq")
SECOND = ("softmax[forget=unscaled]", "nystrom[landmarks=5,skip=true]", "mlstm", "kda", "mesa")
OTHERS = (
    *("softmax[distance=slopes]", "path[forget=scaled,flush=3]", "deltaformer"),
    *("windowed[size=3,shift=1,scale=0.3]", "gsa", "atk(kda)", "lucid[normalize=rows]"),
    *("lucid(path[flush=3])", "differential[per=token]", "qk_norm[norm=layer,gain=true]"),
)
"""With the others, one mechanism of each kind of code."""
MODES = {"jax_numpy_rank_promotion": "raise", "jax_numpy_dtype_promotion": "strict"}
MODES |= {"jax_debug_nans": True, "jax_disallow_mesh_context_manager": True}
T = 9
MASKS = {"lengths": [T, 4], "key_mask": np.arange(2 * T).reshape(2, T) % 5 > 0}


def rows():
    """Each mechanism is traced; some run, which JAX compiles operation by operation."""
    for text in (*FIRST, *SECOND, *OTHERS):
        thorough = [pytest.mark.thorough] * (text in OTHERS)
        yield pytest.param("float32", text, False, id=f"{text}-traced", marks=thorough)
    yield pytest.param("float64", "lucid", False, id="lucid-float64", marks=pytest.mark.thorough)
    yield pytest.param("float32", FIRST[0], True, marks=pytest.mark.thorough)
    for text in (*FIRST[1:], *SECOND, *OTHERS):
        yield pytest.param("float32", text, True, id=f"{text}-float32", marks=pytest.mark.slow)


@pytest.mark.parametrize(("dtype", "text", "runs"), list(rows()))
def test_every_verb_runs_in_the_strict_modes(dtype, text, runs):
    m = pa.parse(text)
    made = inputs_of(m, t=T)

    def verbs(x, masks, backend=None):
        out, pullback = m.vjp(**x, backend=backend)
        gradient = jax.grad(lambda x: m(**x, **masks, backend=backend).sum())(x)
        results = [m(**x, **masks, backend=backend), pullback(out), gradient]
        if m.offers.causal and "bias" not in x:
            cache = m.init_cache(**x, capacity=2 * T)
            _, cache = m.extend(cache, **x, lengths=masks["lengths"], backend=backend)
            results.append(m.extend(cache, **x, backend=backend)[0])
        return results

    def both(x, masks):
        return verbs(x, masks), verbs(x, masks, "reference")

    with ExitStack() as stack:
        stack.enter_context(jax.enable_x64(dtype == "float64"))
        for name, value in MODES.items():
            stack.callback(jax.config.update, name, getattr(jax.config, name))
            jax.config.update(name, value)
        x = {name: jax.numpy.asarray(array, dtype=dtype) for name, array in made.items()}
        masks = {name: jax.numpy.asarray(mask) for name, mask in MASKS.items()}
        found = both(x, masks) if runs else jax.eval_shape(both, x, masks)
        assert all(array.dtype == dtype for array in jax.tree.leaves(found))
        if runs:
            with jax.transfer_guard("disallow"):  # Outside `jit`, JAX itself transfers constants.
                jax.jit(verbs)(x, masks)
    named("jax").forget()  # A process maps a limited number of regions.


KINDS = {
    "lengths above": ["lucid", "path[flush=3]"],
    "lengths below": ["softmax"],
    "lengths huge": ["softmax"],
    "torn segments": ["lucid", "laser"],
    "capacity": ["lucid", "softmax"],
    "new lengths above": ["laser", "path[flush=3]"],
}
"""What is invalid, and mechanisms; masks are checked before any of them runs."""


def assert_only_sequence_one_is_nan(out, expected):
    assert np.isnan(out[1]).all(), "sequence 1 has plausible values"
    for i in (0, 2):
        np.testing.assert_allclose(out[i], expected[i], rtol=1e-12, atol=1e-12)


def traced_inputs(mechanism):
    layout = CallLayout("traced", b=3, t=4, s=4, h=2, n=2, d=3, e=3)
    return {n: jnp.asarray(a) for n, a in make_inputs(mechanism, layout, "random").items()}


def traced_outputs(mechanism, kind):
    """Outputs of a jitted call with masks that are invalid in sequence 1, and with valid ones."""
    x = traced_inputs(mechanism)
    if kind.startswith("lengths"):
        run = jax.jit(lambda lengths: mechanism(**x, lengths=lengths))
        bad = {"lengths above": 5, "lengths below": -1, "lengths huge": 2**32 + 2}[kind]
        return tuple(run(jnp.asarray([2, n, 4])) for n in (bad, 3))
    if kind == "torn segments":
        run = jax.jit(lambda ids: mechanism(**x, segment_ids=ids))
        ids = jnp.asarray([[0, 0, 1, 1], [0, 1, 0, 0], [3, 3, 3, 3]])
        return run(ids), run(ids.at[1].set(0))
    if kind == "capacity":
        run = jax.jit(lambda cache: mechanism.extend(cache, **x)[0])
        cache = mechanism.init_cache(**x, capacity=6)
        _, bad = mechanism.extend(cache, **x, lengths=[1, 3, 2])
        _, good = mechanism.extend(cache, **x, lengths=[1, 2, 2])
        return run(bad), run(good)
    run = jax.jit(lambda cache, n: mechanism.extend(cache, **x, lengths=n)[0])
    cache = mechanism.init_cache(**x, capacity=8)
    return tuple(run(cache, jnp.asarray([2, n, 4])) for n in (5, 3))


@pytest.mark.parametrize(
    ("text", "kind"), [(text, kind) for kind, texts in KINDS.items() for text in texts]
)
def test_invalid_traced_masks_give_nan_for_their_sequence_only(text, kind):
    out, expected = traced_outputs(pa.parse(text), kind)
    assert not np.isnan(expected).any()
    assert_only_sequence_one_is_nan(out, expected)


@pytest.mark.parametrize(
    ("text", "count"),
    [("softmax[window=2]", 5), ("lucid(laser)", -1), ("lucid(path)", 5), ("path[flush=3]", -1)],
)
def test_a_sequence_with_invalid_traced_lengths_stays_nan_when_its_cache_is_extended(text, count):
    mechanism = pa.parse(text)
    x = traced_inputs(mechanism)
    run = jax.jit(lambda cache, n: mechanism.extend(cache, **x, lengths=n))
    cache = mechanism.init_cache(**x, capacity=32)
    _, invalid = run(cache, jnp.asarray([2, count, 4]))
    _, valid = run(cache, jnp.asarray([2, 3, 4]))
    whole = jnp.asarray([4, 4, 4])
    assert_only_sequence_one_is_nan(run(invalid, whole)[0], run(valid, whole)[0])


def test_gradients_of_a_sequence_with_invalid_traced_lengths_are_nan():
    q = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 2, 4)))
    gradient = jax.jit(jax.grad(lambda v, n: pa.softmax(q, q, v, lengths=n).sum()))
    found = np.asarray(gradient(q, jnp.asarray([9, 3])))
    assert np.isnan(found[0]).all()
    assert np.isfinite(found[1]).all()
