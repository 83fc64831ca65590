"""Scans: loops along the time axis that carry a state.

The array-API standard has no such function. In JAX, `lax.scan` is necessary: an unrolled loop over
2,000 tokens would be traced as 2,000 copies of the step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from precondattn.arrays import Array, library_of, namespace
from precondattn.native.ordinary import is_ordinary

TIME = 2
"""The index of the time axis, after batch and heads."""

Token = tuple[Any, ...]
"""The slices of all inputs for one token."""


def scan(
    step: Callable[[Array, Token], tuple[Array, Array]],
    state: Array,
    inputs: tuple[Array, ...],
    *,
    reverse: bool = False,
) -> tuple[Array, Array]:
    """The last state, and the outputs along axis 2, of `state, output = step(state, token)`.

    The loop runs over axis 2 of the inputs (b, m, t, …), from the last token to the first if
    `reverse` is set. Outputs are always in the order of tokens. `step` must be a module-level
    function, because JAX caches the compiled scan by its identity.
    """
    if library_of(state) == "jax":
        return _scan_of_jax(step, state, inputs, reverse)
    if is_ordinary(state):
        from precondattn.native import torch_scan

        return torch_scan.scan(step, state, inputs, reverse=reverse)
    xp = namespace(state)
    times = range(inputs[0].shape[TIME])
    outputs = []
    for t in reversed(times) if reverse else times:
        state, output = step(state, tuple(x[:, :, t, ...] for x in inputs))
        outputs.append(output)
    return state, xp.stack(outputs[::-1] if reverse else outputs, axis=TIME)


def linear_scan(
    factor: Array,
    value: Array,
    *,
    times: Callable[[Array, Array], Array],
    plus: Callable[[Array, Array], Array],
) -> Array:
    """The recurrence y_t = factor_t ⊗ y_{t−1} ⊕ value_t along the last axis, from y_0 = value_0.

    `plus` ⊕ and `times` ⊗ are the operations of a semiring, such as + and ·, or max and +. It takes
    log₂ s steps, each of which reaches twice as far back. Factors are combined from neighbours, not
    computed as differences of cumulative sums.
    """
    if is_ordinary(value):
        from precondattn.native import torch_scan

        return torch_scan.linear_scan(factor, value, times, plus)
    if library_of(value) == "jax" and not isinstance(value.shape[-1], int):
        return _scan_of_any_length(factor, value, times, plus)
    xp, distance = namespace(value), 1
    while distance < value.shape[-1]:
        reached = times(factor[..., distance:], value[..., :-distance])
        later = plus(reached, value[..., distance:])
        value = xp.concat([value[..., :distance], later], axis=-1)
        both = times(factor[..., distance:], factor[..., :-distance])
        factor = xp.concat([factor[..., :distance], both], axis=-1)
        distance *= 2
    return value


def running_maximum(array: Array, axis: int) -> Array:
    """The cumulative maximum along an axis."""
    library = library_of(array)
    if is_ordinary(array):
        from precondattn.native import torch_scan

        return torch_scan.running_maximum(array, axis)
    if library == "torch":
        return array.cummax(axis).values
    if library == "jax":
        return sys.modules["jax"].lax.cummax(array, axis=axis)
    xp = namespace(array)
    if library in ("numpy", "cupy"):
        return xp.maximum.accumulate(array, axis=axis)
    array = xp.moveaxis(array, axis, 0)
    distance = 1
    while distance < array.shape[0]:
        later = xp.maximum(array[distance:, ...], array[:-distance, ...])
        array = xp.concat([array[:distance, ...], later], axis=0)
        distance *= 2
    return xp.moveaxis(array, 0, axis)


def _scan_of_jax(
    step: Callable[..., tuple[Array, Array]], state: Array, inputs: Token, reverse: bool
) -> tuple[Array, Array]:
    jax = sys.modules["jax"]
    xp = namespace(state)
    time_first = tuple(xp.moveaxis(x, TIME, 0) for x in inputs)
    state, outputs = jax.lax.scan(step, state, time_first, reverse=reverse)
    return state, xp.moveaxis(outputs, 0, TIME)


def _scan_of_any_length(
    factor: Array, value: Array, times: Callable[..., Array], plus: Callable[..., Array]
) -> Array:
    """`linear_scan` in JAX for a symbolic number of tokens, and so an unknown number of steps."""
    jax, xp = sys.modules["jax"], namespace(value)

    def step(y: Array, token: Token) -> tuple[Array, Array]:
        y = plus(times(token[0], y), token[1])
        return y, y

    later = tuple(xp.moveaxis(array[..., 1:], -1, 0) for array in (factor, value))
    _, outputs = jax.lax.scan(step, value[..., 0], later)
    return xp.concat([value[..., :1], xp.moveaxis(outputs, 0, -1)], axis=-1)
