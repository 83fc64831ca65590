"""The checks: outputs, gradients and caching of one case against the oracle.

A check gives the worst error it saw and the bound it was held to, or raises. Every array handed to
a backend is compared with a copy afterwards: inputs are never written to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

import precondattn as pa
from precondattn.explanation import Explanation
from precondattn_conformance import libraries
from precondattn_conformance.cancellation import sizes_of_terms
from precondattn_conformance.case import Case
from precondattn_conformance.declared import is_bounded, is_smooth
from precondattn_conformance.inputs import Arrays, Layout, make_inputs, slice_tokens
from precondattn_conformance.tolerance import bound, error

Backend = str | tuple[str, ...] | None


@dataclass(frozen=True)
class Measured:
    """How far a result was from the oracle, and how far it may be."""

    error: float
    bound: float


class DisagreementError(AssertionError):
    """A result that is not the oracle's."""


@dataclass(frozen=True)
class Oracle:
    """The oracle's answer: inputs as rounded, output, a cotangent, and gradients."""

    inputs: Arrays
    masks: Arrays
    out: np.ndarray
    cotangent: np.ndarray
    gradients: Arrays
    terms: dict[str, float]
    """The size of what is summed, of gradients that are sums whose terms cancel."""


def run(case: Case, backend: Backend = None, device: str | None = None) -> Measured:
    """One case, on one backend (or whatever is chosen for it)."""
    library = libraries.named(case.library, device)
    with library.precision(case.dtype):
        return CHECK[case.check](case, library, backend)


@lru_cache(maxsize=256)
def oracle(mechanism: str, layout: Layout, kind: str, dtype: str) -> Oracle:
    """The reference in float64 on NumPy, its gradient held against central differences."""
    m = pa.parse(mechanism)
    inputs = make_inputs(m, layout, kind)
    if not is_bounded(m) and "k" in inputs:
        inputs["k"] = 0.5 * inputs["k"]
    inputs = {name: _rounded(array, dtype) for name, array in inputs.items()}
    masks = layout.masks()
    out, pullback = m.vjp(**inputs, **masks, backend="reference")
    cotangent = _rounded(np.random.default_rng(1).normal(size=out.shape), dtype)
    gradients = pullback(cotangent)
    for name in inputs if is_smooth(m, kind) and dtype == "float64" else ():
        rounding = float(np.finfo(np.float64).eps * np.sum(np.abs(out * cotangent)))
        _check_direction(m, inputs, masks, cotangent, name, gradients[name], rounding)
    terms = sizes_of_terms(m, inputs, gradients)
    return Oracle(inputs, masks, out, cotangent, gradients, terms)


def _rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    """The nearest values that the dtype has, in float64."""
    if dtype == "bfloat16":
        # Eight bits of mantissa: add half of the last kept bit (ties to even), cut the others.
        bits = array.astype(np.float32).view(np.uint32)
        bits = bits + 0x7FFF + ((bits >> 16) & 1)
        return (bits & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
    return array.astype(dtype).astype(np.float64)


def _check_direction(
    m: pa.Mechanism,
    x: Arrays,
    masks: Arrays,
    cotangent: np.ndarray,
    name: str,
    g: np.ndarray,
    rounding: float,
) -> None:
    """One central difference along a random direction of one input; `rounding` is its terms'."""
    direction = np.random.default_rng(2).normal(size=x[name].shape)
    if masks.keys() & {"lengths"}:
        direction = np.where(g == 0, 0.0, direction)
    h = 1e-6

    def value(sign: float) -> float:
        moved = {**x, name: x[name] + sign * h * direction}
        return float(np.sum(m(**moved, **masks, backend="reference") * cotangent))

    found, expected = (value(1) - value(-1)) / (2 * h), float(np.sum(g * direction))
    size = float(np.sqrt(np.sum(g**2) * np.sum(direction**2)))
    if not abs(found - expected) <= 1e-6 * size + rounding / h:
        raise DisagreementError(
            f"the oracle's own gradient of {name} is {expected:.9g} along a direction, "
            f"and {found:.9g} by central differences"
        )


def _require_work(backend: Backend, explanation: Explanation) -> None:
    """The first backend named is the one under test; the others may help it, not replace it."""
    if backend is None:
        return
    under_test = backend if isinstance(backend, str) else backend[0]
    if under_test not in explanation.backends:
        raise pa.UnsupportedError(f"{under_test} takes nothing of this:\n{explanation}")


def _outputs(case: Case, library: libraries.Library, backend: Backend) -> Measured:
    expected, m, inputs, masks = _prepare(case, library)
    _require_work(backend, m.explain(**inputs, **masks, backend=backend))
    out = m(**inputs, **masks, backend=backend)
    _check_purity(library, inputs, expected)
    return _compare(case, {"the output": (library.numpy(out), expected.out)})


def _gradients(case: Case, library: libraries.Library, backend: Backend) -> Measured:
    expected, m, inputs, masks = _prepare(case, library)
    _require_work(backend, m.explain(**inputs, **masks, backend=backend, verb="vjp"))
    cotangent = library.array(expected.cotangent, case.dtype)
    out, pullback = m.vjp(**inputs, **masks, backend=backend)
    explicit = pullback(cotangent)
    pairs = {"the output of vjp": (library.numpy(out), expected.out)}
    for name, gradient in explicit.items():
        pairs[f"vjp of {name}"] = (library.numpy(gradient), expected.gradients[name])
    automatic = library.gradients(lambda x: m(**x, **masks, backend=backend), inputs, cotangent)
    for name, gradient in (automatic or {}).items():
        pairs[f"autograd of {name}"] = (library.numpy(gradient), expected.gradients[name])
    _check_purity(library, inputs, expected)
    terms = {
        f"{by} of {name}": size
        for by in ("vjp", "autograd")
        for name, size in expected.terms.items()
    }
    return _compare(case, pairs, terms)


def _caching(case: Case, library: libraries.Library, backend: Backend) -> Measured:
    """A prefill, single tokens and a block equal the full call; mostly with room to spare."""
    expected, m, inputs, _ = _prepare(case, library)
    time = case.layout.t
    capacity = time if case.layout.mask == "key_mask" else time + 3
    arrays = {
        name: _with_capacity(m, name, array, capacity) for name, array in expected.inputs.items()
    }
    cache = m.init_cache(**inputs, capacity=capacity, key_mask=case.layout.mask == "key_mask")
    outs, start = [], 0
    for stop in _splits(time):
        tokens = slice_tokens(m, arrays, start, stop)
        options: dict[str, Any] = {}
        if case.layout.mask == "lengths":
            valid = np.clip(expected.masks["lengths"] - start, 0, stop - start)
            options["lengths"] = library.array(valid)
        if case.layout.mask == "key_mask":
            options["key_mask"] = library.array(expected.masks["key_mask"][:, start:stop])
        new = {name: library.array(array, case.dtype) for name, array in tokens.items()}
        if start == 0:
            _require_work(backend, m.explain(**new, **options, cache=cache, backend=backend))
        out, cache = m.extend(cache, **new, **options, backend=backend, donate=start > 1)
        outs.append(library.numpy(out))
        start = stop
    _check_purity(library, inputs, expected)
    return _compare(case, {"the extended output": (np.concatenate(outs, axis=1), expected.out)})


def _states(case: Case, library: libraries.Library, backend: Backend) -> Measured:
    """From a state that other tokens left, through to the gradients of it and of the last one."""
    expected, m, inputs, masks = _prepare(case, library)
    before = make_inputs(m, case.layout, "random", seed=1)
    left = m.extend(m.init_cache(**before), **before, backend="reference")[1]
    start = {name: _rounded(state, case.dtype) for name, state in left.store.items()}
    rng = np.random.default_rng(3)
    d_last = {name: _rounded(rng.normal(size=s.shape), case.dtype) for name, s in start.items()}
    oracle_of = (expected.inputs, start, expected.masks, expected.cotangent, d_last)
    wanted = _through_states(m, *oracle_of, "reference")
    if case.dtype == "float64" and is_smooth(m, case.kind):
        _check_direction_of_states(m, *oracle_of, wanted)

    state_dtype = "float64" if case.dtype == "float64" else "float32"
    start, d_last = (
        {name: library.array(array, state_dtype) for name, array in arrays.items()}
        for arrays in (start, d_last)
    )
    cotangent = library.array(expected.cotangent, case.dtype)
    cache = m.init_cache(**inputs)._replace(store=start)
    _require_work(backend, m.explain(**inputs, **masks, cache=cache, verb="vjp", backend=backend))
    found = _through_states(m, inputs, start, masks, cotangent, d_last, backend)

    def total(x: Arrays) -> Any:
        own = {name: x[name] for name in inputs}
        store = {name: x[name] for name in start}
        out, last = m.extend(cache._replace(store=store), **own, **masks, backend=backend)
        return (out * cotangent).sum() + sum((last.store[n] * d_last[n]).sum() for n in start)

    pairs = {what: (library.numpy(array), wanted[what]) for what, array in found.items()}
    one = library.array(np.asarray(1.0), case.dtype)
    automatic = library.gradients(total, {**inputs, **start}, one)
    for name, gradient in (automatic or {}).items():
        pairs[f"autograd of {name}"] = library.numpy(gradient), wanted[f"vjp of {name}"]
    _check_purity(library, inputs, expected)
    return _compare(case, pairs)


def _through_states(
    m: pa.Mechanism,
    x: Arrays,
    start: Arrays,
    masks: Arrays,
    cotangent: Any,
    d_last: Arrays,
    backend: Backend,
) -> Arrays:
    """Output, last state, and the gradients of inputs and first state, by what they are."""
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
    wanted: Arrays,
) -> None:
    """One central difference of the oracle along a random direction of its first state."""
    rng, h = np.random.default_rng(4), 1e-6
    along = {name: rng.normal(size=state.shape) for name, state in start.items()}

    def value(sign: float) -> float:
        moved = {name: state + sign * h * along[name] for name, state in start.items()}
        cache = m.init_cache(**x)._replace(store=moved)
        out, last = m.extend(cache, **x, **masks, backend="reference")
        ends = sum(np.sum(last.store[name] * d_last[name]) for name in start)
        return float(np.sum(out * cotangent) + ends)

    found = (value(1) - value(-1)) / (2 * h)
    terms = [wanted[f"vjp of {name}"] * along[name] for name in start]
    expected = float(sum(np.sum(term) for term in terms))
    size = float(sum(np.sum(np.abs(term)) for term in terms))
    if not abs(found - expected) <= 1e-6 * max(size, 1.0):
        raise DisagreementError(
            f"the oracle's own gradient of its first state is {expected:.9g} along a direction, "
            f"and {found:.9g} by central differences"
        )


def _splits(time: int) -> list[int]:
    """Where the blocks end: a prefill and single tokens; short sequences also begin with one."""
    if time > 16:
        return [time - 2, time - 1, time]
    return sorted({1, max(time // 2, 1), min(time // 2 + 1, time), min(time // 2 + 2, time), time})


def _with_capacity(m: pa.Mechanism, name: str, array: np.ndarray, capacity: int) -> np.ndarray:
    """Pairs of query and key, with as many key columns as the cache has slots."""
    if not m.inputs[name].is_pairwise:
        return array
    more = capacity - array.shape[-1]
    return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, more)], constant_values=7.0)


def _prepare(case: Case, library: libraries.Library) -> tuple[Oracle, pa.Mechanism, Any, Any]:
    expected = oracle(case.mechanism, case.layout, case.kind, case.dtype)
    inputs = {name: library.array(a, case.dtype) for name, a in expected.inputs.items()}
    masks = {name: library.array(a) for name, a in expected.masks.items()}
    return expected, pa.parse(case.mechanism), inputs, masks


def _check_purity(library: libraries.Library, inputs: Arrays, expected: Oracle) -> None:
    for name, array in inputs.items():
        if not np.array_equal(library.numpy(array), expected.inputs[name]):
            raise DisagreementError(f"the input {name} was written to")


def _compare(
    case: Case,
    pairs: dict[str, tuple[np.ndarray, np.ndarray]],
    terms: dict[str, float] | None = None,
) -> Measured:
    limit = bound(case.dtype, case.kind)
    worst = 0.0
    for what, (found, expected) in pairs.items():
        seen = error(found, expected, (terms or {}).get(what, 0.0))
        if not seen <= limit:
            at = np.unravel_index(np.argmax(np.abs(found - expected)), expected.shape)
            raise DisagreementError(
                f"{what} is off by {seen:.3g} (bound {limit:.1g}); worst at "
                f"{tuple(map(int, at))}: {found[at]:.9g} found, {expected[at]:.9g} expected"
            )
        worst = max(worst, seen)
    return Measured(worst, limit)


CHECK: dict[str, Callable[[Case, libraries.Library, Backend], Measured]] = {
    "outputs": _outputs,
    "gradients": _gradients,
    "caching": _caching,
    "states": _states,
}
