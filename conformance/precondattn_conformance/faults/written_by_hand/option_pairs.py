"""Faults of options in pairs, of the order of calls, and of ranges in half precision."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import numpy as np

import precondattn as pa
from precondattn.algebra.options import OptionValue
from precondattn.arrays import Array
from precondattn.spec import recurrence, rms_norm, softmax
from precondattn.spec.lucid import LucidSolve
from precondattn.spec.recurrence import Stream
from precondattn_conformance.faults.fault import (
    BACKWARD,
    FORWARD,
    Change,
    Fault,
    Function,
    MethodCall,
    MethodResult,
    Truth,
    inside,
    with_call,
)
from precondattn_conformance.faults.written_by_hand.written import written

BOTH = (FORWARD, BACKWARD)
SENTINEL = -1e4


def faults() -> list[Fault]:
    """All faults in this file."""
    option_pairs: tuple[tuple[str, tuple[str, ...] | str, str, Change], ...] = (
        ("softmax", BOTH, "a window of at most a block", with_call(_at_most_a_block)),
        ("path", FORWARD, "a window of at most a block", with_call(_at_most_a_block)),
        ("softmax", FORWARD, "a window, and so no bias", with_call(_no_bias)),
        ("softmax", FORWARD, "a cap after the bias", with_call(_cap_last)),
        ("softmax", FORWARD, "a sink, and so no window", with_call(_no_window)),
    )
    return [
        *(written(m, on, what, how, has_options=True) for m, on, what, how in option_pairs),
        written(
            "qk_norm(lucid)",
            FORWARD,
            "the default eps",
            inside(LucidSolve, "_rms", _default_eps),
            subject="lucid_solve",
            has_options=True,
        ),
        # The order of calls.
        written("gla", BOTH, "the inputs of the last forward of these shapes", _Last("k")),
        written("lucid_solve", BOTH, "the inputs of the last forward of these shapes", _Last("k")),
        written("ssd", FORWARD, "the decays of the first call of these shapes", _First("g")),
        # Ranges.
        written("softmax", BOTH, "a finite number at masked pairs", _finite_mask()),
        written("path", FORWARD, "a finite number at masked pairs", _finite_mask()),
        *_of_half(),
    ]


def _of_half() -> list[Fault]:
    return [
        written(
            mechanism,
            BOTH,
            f"{what} in float16",
            _in_float16(change),
            carrier="autograd",
            library="torch",
        )
        for mechanism, what, change in (
            ("rms_norm", "squares", inside(rms_norm, "row_sum", _of_rounded)),
            ("lucid_solve", "squares", inside(rms_norm, "row_sum", _of_rounded)),
            ("linear", "the state after every chunk", _at_chunks("_add_and_read")),
            ("gated_delta", "the state after every chunk", _at_chunks("_correct_and_read")),
        )
    ]


def _attention(call: MethodCall) -> pa.Softmax | pa.Path:
    assert isinstance(call.mechanism, pa.Softmax | pa.Path)
    return call.mechanism


def _with_options(call: MethodCall, **options: OptionValue) -> MethodCall:
    return replace(call, mechanism=dataclasses.replace(_attention(call), **options))


def _at_most_a_block(call: MethodCall) -> MethodCall:
    window = _attention(call).window
    return call if window is None else _with_options(call, window=min(window, 16))


def _no_bias(call: MethodCall) -> MethodCall:
    if _attention(call).window is None or "bias" not in call.inputs:
        return call
    return call.given(bias=0 * call.inputs["bias"])


def _cap_last(call: MethodCall) -> MethodCall:
    """The cap is not applied if there is a bias."""
    assert isinstance(call.mechanism, pa.Softmax)
    has_both = call.mechanism.softcap is not None and "bias" in call.inputs
    return _with_options(call, softcap=None) if has_both else call


def _no_window(call: MethodCall) -> MethodCall:
    assert isinstance(call.mechanism, pa.Softmax)
    return _with_options(call, window=None) if call.mechanism.sink else call


def _default_eps(true: Function) -> Function:
    return lambda leaf, k: true(dataclasses.replace(leaf, eps=1e-6), k)


def _shapes(call: MethodCall) -> tuple[object, ...]:
    return tuple((name, array.shape, str(array.dtype)) for name, array in call.inputs.items())


class _Last:
    """A workspace for an input, shared by all calls of the same shapes; the gradient reads it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.held: dict[tuple[object, ...], np.ndarray] = {}

    def __call__(self, truth: Truth, call: MethodCall) -> MethodResult:
        if call.stage == FORWARD:
            self.held[_shapes(call)] = np.array(call.inputs[self.name])
            return truth(call)
        return truth(call.given(**{self.name: self.held[_shapes(call)]}))


class _First:
    """A quantity that is computed only in the first call of each shape."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.held: dict[tuple[object, ...], np.ndarray] = {}

    def __call__(self, truth: Truth, call: MethodCall) -> MethodResult:
        first = self.held.setdefault(_shapes(call), np.array(call.inputs[self.name]))
        return truth(call.given(**{self.name: first}))


def _finite_mask() -> Change:
    """A finite number replaces −∞ in rows that have visible keys."""

    def masked(true: Function) -> Function:
        def scores_of(visible: Array, scores: Array) -> Array:
            finite = np.where(visible, scores, SENTINEL)
            return np.where(visible.any(axis=-1, keepdims=True), finite, -np.inf)

        return scores_of

    return inside(softmax, "mask_scores", masked)


def _in_float16(change: Change) -> Change:
    def planted(truth: Truth, call: MethodCall) -> MethodResult:
        result: MethodResult = change(truth, call) if call.dtype == "float16" else truth(call)
        return result

    return planted


def _rounded(x: Array) -> Array:
    import torch

    return x.to(torch.float16).to(x.dtype)


def _of_rounded(true: Function) -> Function:
    return lambda x: true(_rounded(x))


def _at_chunks(step: str) -> Change:
    """The state rounded to float16 after every 16 tokens."""

    def change(true: Function) -> Function:
        count = 0

        def stepped(state: Array, token: Stream) -> tuple[Array, Array]:
            nonlocal count
            count += 1
            state, o = true(state, token)
            return (state if count % 16 else _rounded(state)), o

        return stepped

    return inside(recurrence, step, change)
