"""Requests to a process that computes divided calls, and its replies."""

from __future__ import annotations

import faulthandler
import importlib
import signal
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.connection import Connection
from typing import IO, NamedTuple

import numpy as np

import precondattn as pa
from precondattn.arrays import Arrays
from precondattn.dispatch.discovery import discover
from precondattn_conformance.checks.check import Backend
from precondattn_conformance.libraries import Library
from precondattn_conformance.status import FAILED, UNSUPPORTED

BEFORE_KILLING = 2.0
"""Seconds before the time limit at which a hanging process writes its traceback."""


class ProcessStart(NamedTuple):
    """Start-up arguments of a process."""

    rank: int
    devices: int
    store: str
    """The file through which the processes find each other"""
    backend: Backend
    timeout: float
    traces: str
    """The file for its traceback, if it hangs or crashes"""
    inside: str | None
    """A context manager for all calls, as "module:function\""""


class PartOfCall(NamedTuple):
    """A device's part of a call."""

    mechanism: str
    layout: str
    dtype: str
    inputs: Arrays
    masks: Arrays
    cotangent: np.ndarray


class Reply(NamedTuple):
    """Output and gradients of a part, or the reason why there are none."""

    status: str
    reason: str = ""
    details: str = ""
    out: np.ndarray | None = None
    gradients: Arrays | None = None


def context_manager(text: str) -> Callable[[], AbstractContextManager[object]]:
    """The context manager with the name "package.module:function".

    Raises
    ------
    ValueError
        if it does not exist.
    """
    module, _, name = text.partition(":")
    try:
        found: Callable[[], AbstractContextManager[object]]
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"--inside: expected the name of a context manager, as my_tests.tiles:small_tiles; "
            f"found {text!r}: {error}"
        ) from None
    return found


def answer(
    connection: Connection,
    start: ProcessStart,
    traces: IO[str],
    reply_to: Callable[[list[PartOfCall]], list[Reply]],
) -> None:
    """The main loop of a process: receive its parts of a call, send their replies."""
    discover()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent decides when to stop.
    with context_manager(start.inside)() if start.inside else nullcontext():
        connection.send("started")
        while True:
            try:
                parts = connection.recv()
            except EOFError:
                return
            faulthandler.dump_traceback_later(max(start.timeout - BEFORE_KILLING, 0.1), file=traces)
            replies = _tried(reply_to, parts)
            faulthandler.cancel_dump_traceback_later()
            connection.send(replies)


def _tried(
    reply_to: Callable[[list[PartOfCall]], list[Reply]], parts: list[PartOfCall]
) -> list[Reply]:
    """The replies; a refusal or an error is the reply to every part."""
    try:
        return reply_to(parts)
    except pa.UnsupportedError as refusal:
        reply = Reply(UNSUPPORTED, str(refusal))
    except Exception as error:
        reason = f"raised {type(error).__name__}: {error}"
        reply = Reply(FAILED, reason, traceback.format_exc(limit=-6))
    return [reply] * len(parts)


def fault_of(library: Library, part: PartOfCall, inputs: Arrays, results: Arrays) -> str | None:
    """A fault of a finished call other than its numbers, such as an input that was written to."""
    for name, array in inputs.items():
        if not np.array_equal(library.numpy(array), part.inputs[name], equal_nan=True):
            return f"has written to the input {name}"
    for what, array in results.items():
        found = library.dtype_name(array)
        if found != part.dtype:
            return f"has {what} in {found}, not in {part.dtype}"
    return None
