"""The check `states`: calls that start from a state, and gradients through both states."""

from __future__ import annotations

import numpy as np

import precondattn as pa
from precondattn.arrays import Array, Arrays
from precondattn.execution.cache_checks import keeps_tokens
from precondattn_conformance.case import Case
from precondattn_conformance.checks.caching import Caching
from precondattn_conformance.checks.check import Backend, Measured, Trial
from precondattn_conformance.declared import is_smooth, mechanism_of
from precondattn_conformance.disagreement import require_unchanged
from precondattn_conformance.inputs import make_inputs
from precondattn_conformance.oracle import is_certifying, require_derivative, rounded
from precondattn_conformance.tolerance import error


class States(Caching):
    """The output and the last state from a non-empty first state, and the gradients through them.

    This applies to mechanisms whose cache is a state and not a history of tokens. The cotangent is
    a view.
    """

    name = "states"
    snippet = """cache, _ = cache_of(case{where})  # The check fills it first.
out, last, pullback = mechanism.extend_vjp(cache, **inputs, backend={backend})"""

    def applies(self, case: Case) -> bool:
        mechanism = mechanism_of(case.mechanism)
        has_states = bool(mechanism.program.slots) and not keeps_tokens(mechanism)
        return has_states and super().applies(case)

    def run(self, trial: Trial) -> Measured:
        case, library, backend = trial.case, trial.library, trial.backend
        m, inputs, masks = trial.mechanism, trial.inputs, trial.masks
        cache = m.init_cache(**inputs)
        trial.require_used(m.explain(**inputs, **masks, cache=cache, verb="vjp", backend=backend))
        expected = trial.expected
        earlier = make_inputs(m, case.layout, "random", seed=1)
        filled = m.extend(m.init_cache(**earlier), **earlier, backend="reference")[1]
        start = {name: rounded(state, case.dtype) for name, state in filled.store.items()}
        rng = np.random.default_rng(3)
        d_last = {name: rounded(rng.normal(size=s.shape), case.dtype) for name, s in start.items()}
        arguments = (expected.inputs, start, expected.masks, expected.cotangent, d_last)
        oracle = _through_states(m, *arguments, "reference")
        can_differ = case.dtype == "float64" and is_smooth(m, case.kind)
        if can_differ and is_certifying(case.layout):
            _check_direction_of_states(m, *arguments, oracle)

        state_dtype = "float64" if case.dtype == "float64" else "float32"
        start, d_last = (
            {name: library.array(array, state_dtype) for name, array in arrays.items()}
            for arrays in (start, d_last)
        )
        cotangent = trial.cotangent()
        if (
            case.library != "jax" and not case.layout.order
        ):  # The cotangent of a transposed output is a view.
            cotangent = library.view(cotangent, "heads_first")
        cache = cache._replace(store=start)
        given = {**start, **{f"d {name}": d for name, d in d_last.items()}, "cotangent": cotangent}
        before = {name: library.numpy(array).copy() for name, array in given.items()}
        results = _through_states(m, inputs, start, masks, cotangent, d_last, backend)
        for name, array in given.items():
            require_unchanged(f"the array {name!r}", library.numpy(array), before[name])

        def total(x: Arrays) -> Array:
            tokens = {name: x[name] for name in inputs}
            store = {name: x[name] for name in start}
            out, last = m.extend(cache._replace(store=store), **tokens, **masks, backend=backend)
            return (out * cotangent).sum() + sum((last.store[n] * d_last[n]).sum() for n in start)

        pairs = {what: (library.numpy(array), oracle[what]) for what, array in results.items()}
        one = library.array(np.asarray(1.0), state_dtype)  # This is the cotangent of `total`.
        automatic = library.gradients(total, {**inputs, **start}, one)
        for name, gradient in (automatic or {}).items():
            pairs[f"autograd of {name}"] = library.numpy(gradient), oracle[f"vjp of {name}"]
        trial.require_purity()

        def model() -> dict[str, float]:
            """The errors of the float32 reference."""
            if trial.precision != "float32":
                return {}
            x, first, d_out, d_first = (
                _in_float32(a) for a in arguments if a is not expected.masks
            )
            rounded_results = _through_states(
                m, x, first, expected.masks, d_out, d_first, "reference"
            )
            errors = {what: error(a, oracle[what]) for what, a in rounded_results.items()}
            return errors | {f"autograd of {n}": errors[f"vjp of {n}"] for n in (*inputs, *start)}

        return trial.agree(pairs, terms={}, model=model)


def _in_float32(arrays: Array | Arrays) -> Array | Arrays:
    if isinstance(arrays, dict):
        return {name: array.astype(np.float32) for name, array in arrays.items()}
    return arrays.astype(np.float32)


def _through_states(
    m: pa.Mechanism,
    x: Arrays,
    start: Arrays,
    masks: Arrays,
    cotangent: Array,
    d_last: Arrays,
    backend: Backend,
) -> Arrays:
    """Output, last state, and the gradients of the inputs and the first state, by name."""
    cache = m.init_cache(**x)._replace(store=start)
    out, last, pullback = m.extend_vjp(cache, **x, **masks, backend=backend)
    gradients, d_start = pullback(cotangent, d_last)
    return {
        "the output from a state": out,
        **{f"the last {name}": state for name, state in last.store.items()},
        **{f"vjp of {name}": gradient for name, gradient in {**gradients, **d_start}.items()},
    }


def _check_direction_of_states(
    m: pa.Mechanism,
    x: Arrays,
    start: Arrays,
    masks: Arrays,
    cotangent: np.ndarray,
    d_last: Arrays,
    oracle: Arrays,
) -> None:
    """Compare one central difference along a random direction of the first state with the vjp."""
    rng = np.random.default_rng(4)
    direction = {name: rng.normal(size=state.shape) for name, state in start.items()}

    def value(step: float) -> float:
        moved = {name: state + step * direction[name] for name, state in start.items()}
        cache = m.init_cache(**x)._replace(store=moved)
        out, last = m.extend(cache, **x, **masks, backend="reference")
        last_states = sum(np.sum(last.store[name] * d_last[name]) for name in start)
        return float(np.sum(out * cotangent) + last_states)

    terms = [oracle[f"vjp of {name}"] * direction[name] for name in start]
    expected = float(sum(np.sum(term) for term in terms))
    size = float(sum(np.sum(np.abs(term)) for term in terms))
    require_derivative(
        f"the definition of {m} contradicts itself: the gradient of its first state along a random "
        "direction is {expected:.9g} by its `step_backward`, and {difference:.9g} by central "
        "differences of its `step`",
        *(value, expected, 1e-6 * max(size, 1.0)),
    )
