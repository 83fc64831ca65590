"""The check `future`: which results a NaN or infinite token must not reach."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

import precondattn as pa
from precondattn.algebra.declaration import HEADS, Pattern
from precondattn.algebra.leaf_protocol import LeafProtocol
from precondattn.arrays import Array, Arrays
from precondattn_conformance.case import Case
from precondattn_conformance.checks.check import VJP, Check, Measured, Trial
from precondattn_conformance.conventions import HIDDEN_NAN
from precondattn_conformance.declared import mechanism_of
from precondattn_conformance.disagreement import DisagreementError
from precondattn_conformance.inputs import CallLayout


class EntryPlaces(NamedTuple):
    """The sequence, token and key/value head of each entry, as indices that broadcast."""

    sequence: np.ndarray
    token: np.ndarray
    head: np.ndarray


Chosen = Callable[[EntryPlaces], np.ndarray]


class Future(Check):
    """A NaN or infinity in a token reaches no earlier output, no other sequence and no other head.

    A key, or an input that belongs to a key (directions, gates, β), reaches no earlier output, nor
    an earlier output within a block of new tokens. It reaches no gradient of earlier outputs
    either, except in softmax. No input of a token reaches the outputs or gradients of another
    sequence, head or packed segment. Where sequences of a batch depend on each other, exactly the
    outputs that the definition makes NaN may be NaN. If a backend does not promise this for NaN,
    the token has other finite numbers instead.
    """

    name = "future"
    snippet = f"# The check has NaN in a token.\n{VJP}"

    def applies(self, case: Case) -> bool:
        layout = case.layout
        if layout.t != layout.s or layout.t < 4 or layout.mask not in (None, "segment_ids"):
            return False
        return any(not isinstance(leaf, pa.TokenWise) for leaf in _leaves(case.mechanism))

    def run(self, trial: Trial) -> Measured:
        trial.require_outputs()
        with np.errstate(all="ignore"):
            if trial.case.layout.has("segment_ids"):
                errors = [_other_segments(trial, bad) for bad in (np.nan, np.inf)]
            else:
                errors = [_others(trial)]
                if trial.mechanism.offers.causal:
                    errors += [_earlier(trial), before_a_key(trial, np.inf), _extended(trial)]
        return Measured(max(errors), trial.bound)


def _bad_token(layout: CallLayout) -> int:
    """The index of a token inside a block and a segment, after the first token."""
    return layout.t // 2 + 1


def _earlier(trial: Trial) -> float:
    """The error of outputs before a token with NaN keys, and of their gradients."""
    j = _bad_token(trial.case.layout)
    inputs = _with_bad_keys(trial, np.nan)
    if trial.no_gradient:
        out = trial.call(trial.arrays(inputs))
    else:
        out, pullback = trial.mechanism.vjp(**trial.arrays(inputs), backend=trial.backend)
    pairs = {"the output before a NaN": _only(trial, "out", trial.numpy(out), _before(j))}
    worst = trial.agree(pairs).error
    if all(leaf.hides_later_keys for leaf in _leaves(trial.case.mechanism)):
        return worst
    finite = np.argwhere(np.isfinite(trial.numpy(out)[:, j:]).all(axis=-1))
    if finite.size and HIDDEN_NAN not in trial.unpromised:
        sequence, later, *_ = map(int, finite[0])
        raise DisagreementError(
            f"the keys of token {j} are NaN, but the output at b={sequence}, t={j + later} depends "
            "on them and is finite: something replaces NaN, or skips the key"
        )
    if trial.no_gradient:
        return worst
    cotangent = np.where(np.arange(out.shape[1])[:, None, None] < j, trial.expected.cotangent, 0)
    gradients = pullback(trial.library.array(cotangent, trial.case.dtype))
    _, exact = trial.mechanism.vjp(**trial.expected.inputs, backend="reference")
    expected = exact(cotangent)
    for name, gradient in gradients.items():
        if trial.mechanism.inputs[name].time_axis is not None:
            result = trial.numpy(gradient)
            pairs[f"vjp of {name}"] = _only(trial, name, result, _before(j), expected[name])
    return trial.agree(pairs).error


def before_a_key(trial: Trial, bad: float) -> float:
    """The error of outputs before a token whose keys are NaN or infinite."""
    j = _bad_token(trial.case.layout)
    inputs = _with_bad_keys(trial, bad)
    out = trial.mechanism(**trial.arrays(inputs), backend=trial.backend)
    found = _only(trial, "out", trial.numpy(out), _before(j))
    return trial.agree({f"the output before {bad}": found}).error


def _extended(trial: Trial) -> float:
    """The error of outputs of new tokens before one with NaN keys."""
    m, layout = trial.mechanism, trial.case.layout
    if any(pattern.is_pairwise for pattern in m.inputs.values()):
        return 0.0  # The columns of pairs are a cache's.
    j = _bad_token(layout)
    inputs = _with_bad_keys(trial, np.nan)
    cache = m.init_cache(**trial.inputs, capacity=layout.t)
    try:
        out, _ = m.extend(cache, **trial.arrays(inputs), backend=trial.backend)
    except pa.UnsupportedError:
        return 0.0  # A backend may support extension by single tokens only.
    found = _only(trial, "out", trial.numpy(out), _before(j))
    return trial.agree({"the extended output before a NaN": found}).error


def _others(trial: Trial) -> float:
    """The error of other sequences and heads than those of a token that is NaN in all inputs."""
    j = _bad_token(trial.case.layout)
    inputs = _with_bad(
        trial,
        np.nan,
        lambda entry: (entry.sequence == 0) & (entry.head == 0) & (entry.token == j),
        lambda pattern: _axis(pattern, HEADS) is not None,
    )
    if trial.mechanism.mixes_sequences:
        return _as_defined(trial, inputs)
    return _compare(
        trial, inputs, lambda entry: (entry.sequence > 0) | (entry.head > 0), gradients=True
    )


def _as_defined(trial: Trial, inputs: Arrays) -> float:
    """The error of the outputs that are finite by the definition, where others are not."""
    out = trial.numpy(trial.call(trial.arrays(inputs)))
    expected = trial.mechanism(**inputs, backend="reference")
    is_finite = np.isfinite(expected)
    replaced = np.argwhere(np.isfinite(out) & ~is_finite)
    if replaced.size:
        place = ", ".join(f"{axis}={i}" for axis, i in zip("bthe", replaced[0], strict=True))
        raise DisagreementError(
            f"the output at {place} depends on a NaN in another sequence or head and is finite: "
            "something replaces NaN"
        )
    pair = np.where(is_finite, out, 0.0), np.where(is_finite, expected, 0.0)
    return trial.agree({"the output beside a NaN": pair}).error


def _other_segments(trial: Trial, bad: float) -> float:
    """The error of segments without the bad token, and of earlier outputs in its segment."""
    j = _bad_token(trial.case.layout)
    segments = trial.case.layout.masks()["segment_ids"]
    inputs = _with_bad(trial, bad, lambda entry: entry.token == j)

    def of_others(entry: EntryPlaces) -> np.ndarray:
        return np.asarray(segments[entry.sequence, entry.token] != segments[entry.sequence, j])

    worst = _compare(trial, inputs, of_others, gradients=bool(np.isnan(bad)))
    if not trial.mechanism.offers.causal:
        return worst
    return max(worst, _compare(trial, inputs, _before(j), gradients=False))


def _compare(trial: Trial, inputs: Arrays, chosen: Chosen, *, gradients: bool) -> float:
    """The error of the chosen outputs and, with `gradients`, of the chosen gradients."""
    arrays = trial.arrays(inputs)
    if not gradients:
        found = _only(trial, "out", trial.numpy(trial.call(arrays)), chosen)
        return trial.agree({"the output elsewhere": found}).error
    out, by_name = trial.results(arrays)
    pairs = {"the output elsewhere": _only(trial, "out", trial.numpy(out), chosen)}
    for name, gradient in by_name.items():
        pattern = trial.mechanism.inputs[name]
        if pattern.time_axis is not None and not pattern.is_pairwise:
            pairs[f"vjp of {name}"] = _only(trial, name, trial.numpy(gradient), chosen)
    return trial.agree(pairs).error


def _with_bad_keys(trial: Trial, bad: float) -> Arrays:
    """The inputs with one bad token in every input that belongs to a key, except its value."""
    j = _bad_token(trial.case.layout)
    return _with_bad(
        trial,
        bad,
        lambda entry: entry.token == j,
        lambda pattern: "s" in pattern.letters and "e" not in pattern.letters,
    )


def _with_bad(
    trial: Trial,
    bad: float,
    chosen: Chosen,
    is_suitable: Callable[[Pattern], bool] = lambda pattern: True,
) -> Arrays:
    """The inputs with bad entries at chosen places, in inputs with tokens and a suitable pattern.

    If the backend does not promise to hide them, the entries are copied from the token before.
    """
    inputs, is_promised = {}, HIDDEN_NAN not in trial.unpromised
    for name, array in trial.numpy_inputs.items():
        pattern = trial.mechanism.inputs[name]
        has_tokens = pattern.time_axis is not None and not pattern.is_pairwise
        if has_tokens and is_suitable(pattern):
            others = bad if is_promised else np.roll(array, 1, axis=pattern.time_axis)
            array = np.where(chosen(_places(trial, pattern, array.shape)), others, array)
        inputs[name] = array
    return inputs


def _only(
    trial: Trial, name: str, result: np.ndarray, chosen: Chosen, expected: Array = None
) -> tuple[np.ndarray, np.ndarray]:
    """A result with the expected entries where they are not chosen, and the expected result."""
    if name == "out":
        pattern, expected = trial.mechanism.program.output, trial.expected.out
    else:
        pattern = trial.mechanism.inputs[name]
        expected = trial.expected.gradients[name] if expected is None else expected
    return np.where(chosen(_places(trial, pattern, result.shape)), result, expected), expected


def _before(j: int) -> Chosen:
    return lambda entry: entry.token < j


def _places(trial: Trial, pattern: Pattern, shape: tuple[int, ...]) -> EntryPlaces:
    """The places of the entries of an array with this pattern; 0 along axes that it lacks."""
    n = trial.case.layout.n
    index = np.indices(shape, sparse=True)
    zero = np.zeros((1,) * len(shape), dtype=int)
    axes = [_axis(pattern, letters) for letters in ("b", "ts", HEADS)]
    sequence, token, head = (zero if axis is None else index[axis] for axis in axes)
    if axes[2] is not None:
        head = head * n // shape[axes[2]]
    return EntryPlaces(*np.broadcast_arrays(sequence, token, head))


def _axis(pattern: Pattern, letters: str) -> int | None:
    return next((i for i, letter in enumerate(pattern.letters) if letter in letters), None)


def _leaves(expression: str) -> list[LeafProtocol]:
    """The leaves in which tokens interact."""
    leaves = mechanism_of(expression).program.leaves
    return [leaf for leaf in leaves if not isinstance(leaf, pa.TokenWise)]
