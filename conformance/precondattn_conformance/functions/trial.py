"""Tests whether a call of a function runs, by calling it with random inputs.

The shapes are those of the request, with at most `MOST_TOKENS` tokens. The error of a failed trial
is the reason why a backend declines such calls.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np

import precondattn as pa
from precondattn.algebra.declaration import Inputs
from precondattn.algebra.piece import Piece
from precondattn.arrays import Array, Arrays, library_of, namespace, placement, vjp
from precondattn.frame import Frame, full_frame
from precondattn_conformance.conventions import FLOAT64
from precondattn_conformance.inputs import PLAIN, numbers_in_range
from precondattn_conformance.libraries import named

MOST_TOKENS = 320
LONGEST_REASON = 120

Called = Callable[..., tuple[Array, ...]]
"""A function of a piece, its inputs by name, a frame and, if any, a state; it returns an output
and, if any, a state."""


def shortened(piece: Piece, request: pa.Request) -> pa.Request:
    """The request for a trial, with fewer tokens."""
    return replace(request, shapes=_shapes(piece, request), differentiated=False)


def reason_against(
    call: Called, piece: Piece, request: pa.Request, *, promises: frozenset[str]
) -> str:
    """The reason why such a call fails; empty if it runs."""
    library = named(request.library, None if request.device == "cpu" else request.device)
    rng = np.random.default_rng(0)
    try:
        with library.precision(request.dtype), _outside_of_jit(request.library):
            x: Arrays = {
                name: library.array(numbers_in_range(rng, piece.inputs[name], shape), request.dtype)
                for name, shape in request.shapes
            }
            return _fault_of(call, piece, request, x, promises)
    except pa.UnsupportedError as error:
        return str(error)
    except Exception as error:
        return f"raised {type(error).__name__}{_first_line_of(error)}"


def _fault_of(
    call: Called, piece: Piece, request: pa.Request, x: Arrays, promises: frozenset[str]
) -> str:
    frame = _all_visible(piece, request, x)
    states = _no_states(piece, request, x)
    results = call(piece, x, frame, *states)
    out = results[0]
    if library_of(out) != request.library:
        return f"returned {type(out).__name__}, no array of {request.library}"
    expected = tuple(piece.program.output.shape(sizes_of(piece.inputs, dict(request.shapes))))
    if tuple(out.shape) != expected:
        return f"returned the shape {tuple(out.shape)}; expected {expected}"
    if request.dtype == FLOAT64 and FLOAT64 in promises and _is_rounded(out):
        return "computes in float32"
    if request.verb.endswith("vjp"):

        def function(*arrays: Array) -> tuple[Array, ...]:
            by_name = dict(zip(x, arrays, strict=False))
            return call(piece, by_name, frame, *arrays[len(x) :])

        vjp(function, [*x.values(), *states], results)
    return ""


def _all_visible(piece: Piece, request: pa.Request, x: Arrays) -> Frame:
    """The frame of a request, with all keys valid and one segment."""
    like, sizes = next(iter(x.values())), sizes_of(piece.inputs, dict(request.shapes))
    s = sizes["s"] if "s" in sizes else sizes["t"]
    xp, shape = namespace(like), (sizes["b"], s)
    masks: Arrays = {}
    if request.masks & {"key_mask", "lengths"}:
        masks["key_mask"] = xp.ones(shape, dtype=xp.bool, **placement(like))
    if "segment_ids" in request.masks:
        masks["segment_ids"] = xp.zeros(shape, dtype=xp.int32, **placement(like))
    return full_frame(sizes.get("t", s), s, like, **masks)


def _no_states(piece: Piece, request: pa.Request, x: Arrays) -> list[Array]:
    """The state before the first token, for a request that has one."""
    if not request.verb.startswith("extend"):
        return []
    (_, pattern), *_ = piece.program.slots.values()
    sizes = sizes_of(piece.inputs, dict(request.shapes))
    like = next(iter(x.values()))
    xp = namespace(like)
    dtype = xp.float64 if request.dtype == "float64" else xp.float32
    return [xp.zeros(tuple(pattern.shape(sizes)), dtype=dtype, **placement(like))]


def sizes_of(patterns: Inputs, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """The axis sizes by letter; broadcast axes are ignored."""
    return {
        axis.letter: n // axis.multiple
        for name, shape in shapes.items()
        for axis, n in zip(patterns[name].axes, shape, strict=True)
        if not axis.broadcasts
    }


def _shapes(piece: Piece, request: pa.Request) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The shapes of one sequence of the call, with at most `MOST_TOKENS` tokens.

    In JAX, which compiles for each shape, they are the shapes of all sequences.
    """

    def size(letter: str, n: int) -> int:
        if letter == "b" and request.library != "jax":
            return min(n, 1)
        return min(n, MOST_TOKENS) if letter in "ts" else n

    return tuple(
        (
            name,
            tuple(size(a.letter, n) for a, n in zip(piece.inputs[name].axes, shape, strict=True)),
        )
        for name, shape in request.shapes
    )


def plain_request(
    mechanism: pa.Mechanism, library: str, device: str, b: int, t: int, d: int
) -> pa.Request:
    """A call with a key head and a value head for each query head, and equal widths."""
    sizes = PLAIN._replace(b=b, t=t, s=t, h=2, n=2, d=d, e=d, values_per_head=1).sizes
    shapes = tuple((name, tuple(p.shape(sizes))) for name, p in mechanism.inputs.items())
    return pa.Request("forward", library, device, "float32", shapes, frozenset())


def _is_rounded(out: Array) -> bool:
    """Whether a float64 output has only float32 precision."""
    xp = namespace(out)
    return bool(xp.all(xp.astype(xp.astype(out, xp.float32), xp.float64) == out))


def _first_line_of(error: Exception) -> str:
    """The first line of the error's message; if that is empty, the place where it was raised."""
    message = str(error).strip().partition("\n")[0]
    if message:
        return f": {message[:LONGEST_REASON]}"
    (*_, last) = traceback.extract_tb(error.__traceback__)
    return f" at {Path(last.filename).name}:{last.lineno}: {last.line}"


def _outside_of_jit(library: str) -> AbstractContextManager[object]:
    """Context in which JAX computes concrete values, even while it traces the calling function."""
    if library != "jax":
        return nullcontext()
    import jax

    outside: AbstractContextManager[object] = jax.ensure_compile_time_eval()
    return outside
