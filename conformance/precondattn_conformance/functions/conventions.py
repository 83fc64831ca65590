"""Conventions in which published functions differ, each as a guess about a function.

A guess changes the call of the function or the expected output of the oracle. If the two then
agree, the convention explains the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

import precondattn as pa
from precondattn.algebra.declaration import HEADS
from precondattn.algebra.options import fields_of

Inputs = dict[str, np.ndarray]
Expected = Callable[[], np.ndarray]


class Guess(NamedTuple):
    """A convention, and its effect on one call."""

    sentence: str
    """The end of the sentence "right to 2e-7 if …"."""
    expected: Expected
    """Returns the oracle's output under this convention."""
    given: Inputs | None = None
    """The inputs with which the function is called; None for the unchanged inputs."""
    layout: str | None = None
    """The order of axes in which it is called; None for the declared one."""


def guesses(mechanism: pa.Mechanism, x: Inputs, layout: str) -> Iterator[Guess]:
    """Every convention that these inputs can distinguish from the declared one."""
    yield from _heads(mechanism, x)
    yield from _alignment(mechanism, x)
    yield from _options(mechanism, x)
    yield from _gates(mechanism, x)
    yield from _reads(mechanism, x)
    yield from _strengths(mechanism, x)
    yield from _norms(mechanism, x)
    yield from _eps(mechanism, x)
    yield from _order(mechanism, x, layout)


def by_oracle(mechanism: pa.Mechanism, x: Mapping[str, np.ndarray]) -> np.ndarray:
    """The output by the definition, in float64."""
    return np.asarray(mechanism(**x, backend="reference"))


def _changed(mechanism: pa.Mechanism, x: Inputs, **others: np.ndarray) -> Expected:
    return lambda: by_oracle(mechanism, x | others)


def _heads(mechanism: pa.Mechanism, x: Inputs) -> Iterator[Guess]:
    axes = {name: _axis(mechanism, name, HEADS) for name in x}
    counts = {name: x[name].shape[axis] for name, axis in axes.items() if axis is not None}
    most = max(counts.values(), default=1)
    if min(counts.values(), default=1) == most:
        return
    tiled = {
        name: np.concatenate([x[name]] * (most // count), axis=axes[name])
        for name, count in counts.items()
    }
    yield Guess("query head i reads key head i mod n", _changed(mechanism, x, **tiled))


def _alignment(mechanism: pa.Mechanism, x: Inputs) -> Iterator[Guess]:
    t = x["q"].shape[1] if "q" in x else 0
    s = x["k"].shape[1] if "k" in x else 0
    if not t < s or not mechanism.offers.causal:
        return
    first = {
        name: np.take(array, range(t), axis=axis)
        for name, array in x.items()
        if (axis := _axis(mechanism, name, "s")) is not None
    }
    yield Guess(
        "the first query is aligned with the first key, and not the last with the last",
        _changed(mechanism, x, **first),
    )


def _options(mechanism: pa.Mechanism, x: Inputs) -> Iterator[Guess]:
    d = x["q"].shape[-1] if "q" in x else 1
    for name, value, sentence in (
        ("scale", 1.0, "the scale is left out"),
        ("scale", 1.0 / d, "the scale is applied twice"),
        ("scale", d**-0.5, "queries are scaled by d^(-1/2)"),
        ("causal", False, "every query reads every key"),
    ):
        options = fields_of(mechanism)
        if name not in options or getattr(mechanism, name) == value:
            continue
        try:
            other = replace(mechanism, **{name: value})
        except ValueError:
            continue
        yield Guess(sentence, _changed(other, x))


def _gates(mechanism: pa.Mechanism, x: Inputs) -> Iterator[Guess]:
    if "g" not in x or mechanism.inputs["g"].high != 0:
        return
    g = x["g"]
    axis = _axis(mechanism, "g", "ts")
    if axis is None:
        return
    yield Guess(
        "g is the decay itself, and not its logarithm",
        _changed(mechanism, x),
        given=x | {"g": np.exp(g)},
    )
    for by, sentence in (
        (1, "the gate of a token acts one token late"),
        (-1, "the gate of a token acts one token early"),
    ):
        yield Guess(sentence, _changed(mechanism, x, g=_shifted(g, axis, by)))


def _reads(mechanism: pa.Mechanism, x: Inputs) -> Iterator[Guess]:
    recurrence = mechanism.recurrence
    if recurrence is None or recurrence.reads != "after" or "q" not in x:
        return

    def before() -> np.ndarray:
        return _shifted(by_oracle(mechanism, x | {"q": _shifted(x["q"], 1, -1)}), 1, 1)

    yield Guess("a query reads the state before its token", before)
    plain = pa.GatedDelta().recurrence
    if recurrence == plain:
        comba = pa.Comba(scale=getattr(mechanism, "scale", None))
        yield Guess("the delta rule reads the state before its decay", _changed(comba, x, p=x["k"]))


def _strengths(mechanism: pa.Mechanism, x: Inputs) -> Iterator[Guess]:
    if "beta" not in x or not {"v", "k"} <= x.keys() or x["beta"].ndim != 3:
        return
    beta, ones = x["beta"], np.ones_like(x["beta"])
    sentence = "beta is left out (as it is where it scales keys before their norm)"
    yield Guess(sentence, _changed(mechanism, x, beta=ones))
    if x["v"].shape[:3] == beta.shape:
        scaled = x["v"] * beta[..., None]
        yield Guess(
            "beta scales what is written, and not what is erased",
            _changed(mechanism, x, beta=ones, v=scaled),
        )


def _norms(mechanism: pa.Mechanism, x: Inputs) -> Iterator[Guess]:
    units = {name: _unit(x[name]) for name in ("q", "k") if name in x}
    # Delta rules already have keys of length 1.
    changed = {name: rows for name, rows in units.items() if not np.allclose(rows, x[name])}
    if "k" in changed:
        yield Guess("keys are normalised to length 1", _changed(mechanism, x, k=changed["k"]))
    if "q" in changed:
        yield Guess("queries are normalised to length 1", _changed(mechanism, x, q=changed["q"]))
    if len(changed) == 2:
        yield Guess(
            "queries and keys are normalised to length 1", _changed(mechanism, x, **changed)
        )


def _eps(mechanism: pa.Mechanism, x: Inputs) -> Iterator[Guess]:
    """x / (n + ε) equals x c / √(c² n² + ε) with c² = 1 / (2 n + ε), for mechanisms that read only
    normalised queries and keys."""
    eps = getattr(mechanism, "eps", 0.0)
    if mechanism.name not in ("qk_norm", "lucid_solve") or not eps:
        return
    yield Guess("eps is left out", _changed(replace(mechanism, eps=0.0), x))
    is_l2 = getattr(mechanism, "norm", "rms") == "l2"
    scaled = {}
    for name in x.keys() & {"q", "k"}:
        square = (np.sum if is_l2 else np.mean)(x[name] ** 2, axis=-1, keepdims=True)
        scaled[name] = x[name] / np.sqrt(2 * np.sqrt(square) + eps)
    yield Guess(
        "eps is added to the norm, and not under its root", _changed(mechanism, x, **scaled)
    )


def _order(mechanism: pa.Mechanism, x: Inputs, layout: str) -> Iterator[Guess]:
    if {"q", "k"} <= x.keys() and x["q"].shape == x["k"].shape:
        inputs = x | {"q": x["k"], "k": x["q"]}
        yield Guess("q and k are swapped", _changed(mechanism, x), given=inputs)
    other = {"bthd": "bhtd", "bhtd": "bthd"}.get(layout)
    if other is not None:
        yield Guess(f"the axes are in the order {other}", _changed(mechanism, x), layout=other)


def _axis(mechanism: pa.Mechanism, name: str, letters: str) -> int | None:
    axes = mechanism.inputs[name].axes
    return next((i for i, axis in enumerate(axes) if axis.letter in letters), None)


def _shifted(array: np.ndarray, axis: int, by: int) -> np.ndarray:
    """Tokens moved later by one (or earlier, if `by` is −1), with 0 at the free end."""
    shifted = np.roll(array, by, axis=axis)
    index: list[slice | int] = [slice(None)] * array.ndim
    index[axis] = 0 if by > 0 else -1
    shifted[tuple(index)] = 0
    return shifted


def _unit(rows: np.ndarray) -> np.ndarray:
    length = np.linalg.vector_norm(rows, axis=-1, keepdims=True)
    return rows / np.where(length > 0, length, 1.0)
