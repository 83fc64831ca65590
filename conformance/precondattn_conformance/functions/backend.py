"""A function as a backend: `backend_from_function`.

What the function can not do is found by calling it. A kind of call (its dtype, heads, widths,
masks, number of tokens, whether it has a gradient or a state) is first tried with random inputs. An
error there is the reason why the backend declines such calls, and reports show it.
"""

from __future__ import annotations

import traceback
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import numpy as np

import precondattn as pa
from precondattn.algebra.declaration import Inputs
from precondattn.algebra.group import group_of
from precondattn.algebra.options import fields_of
from precondattn.algebra.piece import Piece
from precondattn.algebra.program import Program
from precondattn.arrays import Array, Arrays, Residuals, library_of, namespace, placement
from precondattn.cache import Updates
from precondattn.dispatch.discovery import discover
from precondattn.frame import Frame, full_frame
from precondattn.native.autograd import DIFFERENTIATING, vjp
from precondattn_conformance.conventions import FLOAT64
from precondattn_conformance.functions.arrangement import Arrangement
from precondattn_conformance.functions.declined import declined
from precondattn_conformance.functions.parameters import (
    IN_VISIBLE,
    VISIBLE,
    Function,
    Parameters,
    State,
    leaf_or_whole,
)
from precondattn_conformance.grid import PLAIN
from precondattn_conformance.inputs import numbers_in_range
from precondattn_conformance.libraries import named

T = TypeVar("T")

TRIED = ("torch", "jax", "numpy")
"""The libraries that a function may be of, in the order in which they are tried."""
MOST_TOKENS = 320
"""Tokens of the longest call that is tried before the call itself."""
PLAIN_SIZES = ((2, 5, 8), (1, 64, 64), (1, 128, 128))
"""Sequences, tokens and width of the calls by which libraries are found. The first of them shows
the most, and many kernels take larger ones only."""
LONGEST_REASON = 120


def backend_from_function(
    function: Function,
    mechanism: str | pa.Mechanism,
    *,
    name: str | None = None,
    library: str | None = None,
    layout: str = "bthd",
    heads: str = "grouped",
    multiple: int = 1,
    dtypes: Iterable[str] | None = None,
    gradient: bool = True,
    inputs: Mapping[str, str] | None = None,
    options: Mapping[str, str] | None = None,
    state: State | tuple[str, str] | None = None,
    device: str | None = None,
    devices: Iterable[str] = (),
    promises: frozenset[str] = pa.CONVENTIONS,
) -> FunctionBackend:
    """A backend that computes one mechanism by a function, for the suite and for `backend=`.

    Parameters
    ----------
    function : callable
        Takes the mechanism's inputs by the names of its parameters (q, k, v, g, beta, …; also
        query, key, value), and returns the output (b, t, h, e), alone or first in a tuple. Its
        parameters named as an option of the mechanism (scale, causal, …) get the option, or the
        input that an option adds (bias, sink). `key_mask` (b, s), `segment_ids` (b, s) and
        `visible` (b or 1, 1, t, s: which query sees which key) get masks; `initial_state` with
        `output_final_state` gets the recurrent state.
    mechanism : str or Mechanism
        An expression, such as `"kda"` or `"softmax"`.
    name : str, optional
        Of the backend; the function's by default.
    library : {"torch", "jax", "numpy"}, optional
        The library of its arrays. By default it is called with arrays of each.
    layout : str
        The order of the axes: `"bthd"`, `"bhtd"`, or `"thd"` and `"htd"` for one sequence a call.
    heads : {"grouped", "equal"}
        "equal": it takes as many key and value heads as query heads, so they are repeated.
    multiple : int
        It takes multiples of so many tokens; zeros are appended, and their output is cut off.
    dtypes : iterable of str, optional
        Those in which it computes; found by calling it by default.
    gradient : bool
        Whether the framework's automatic differentiation differentiates it.
    inputs, options : mapping, optional
        Its names of inputs and options, where they differ from the mechanism's.
    state : State or (str, str), optional
        The parameters for the state before the call, and that ask for the state after it.
    device : str, optional
        Where it is called to find the library, as that names it; the CPU by default.
    devices : iterable of str, optional
        The only kinds of devices it runs on, such as `"cuda"`; any by default.
    promises : set of str
        The conventions of `pa.CONVENTIONS` that it keeps; by others it is not compared.

    Raises
    ------
    TypeError
        if an input has no parameter, the function needs an argument that is no input, or a plain
        call fails with arrays of each library.
    ValueError
        for a layout, heads or a multiple that is none, and for names that nothing has.

    Examples
    --------
    >>> import numpy as np, precondattn as pa
    >>> def values(q, k, v):
    ...     return v
    >>> backend = backend_from_function(values, "softmax", library="numpy", gradient=False)
    >>> backend.name, backend.covers
    ('values', frozenset({'softmax'}))
    """
    parsed = pa.parse(str(mechanism))
    if isinstance(state, tuple):
        state = State(*state)
    parameters = Parameters.of(function, parsed, inputs=inputs, options=options, state=state)
    arrangement = Arrangement(layout, heads, multiple)
    known = None if dtypes is None else frozenset(dtypes)
    chosen = name or _name_of(function)
    return FunctionBackend(
        function,
        parsed,
        chosen,
        library,
        parameters,
        arrangement,
        known,
        gradient=gradient,
        device=device,
        devices=devices,
        promises=promises,
    )


def lacks_device(devices: Collection[str], device: str) -> str:
    """Why what runs on these kinds of devices only does not on another; empty if it does."""
    if not devices or device.partition(":")[0] in devices:
        return ""
    return f"needs arrays on {' or '.join(sorted(devices))}; found {device}"


def _name_of(function: Function) -> str:
    """The function's name; another where a backend has it, as `reference` or `torch`."""
    while isinstance(function, partial):
        function = function.func
    name = str(getattr(function, "__name__", type(function).__name__))
    name = "function" if name == "<lambda>" else name
    taken = {backend.name for backend in discover().backends}
    return f"{name}_function" if name in taken else name


class FunctionBackend(pa.Backend):
    """Made by `backend_from_function`."""

    only_by_name = True
    registered_by = ""
    """Code that registers it, for those who reproduce a failure."""

    def __init__(
        self,
        function: Function,
        mechanism: pa.Mechanism,
        name: str,
        library: str | None,
        parameters: Parameters,
        arrangement: Arrangement,
        dtypes: frozenset[str] | None,
        *,
        gradient: bool,
        device: str | None = None,
        devices: Iterable[str] = (),
        promises: frozenset[str] = pa.CONVENTIONS,
    ) -> None:
        self.function, self.mechanism, self.name = function, mechanism, name
        self.program = _program(mechanism)
        self.parameters, self.arrangement, self.dtypes = parameters, arrangement, dtypes
        self.gradient, self.promises = gradient, promises
        self.devices = frozenset(devices)
        self.covers = frozenset({str(mechanism)})
        self._answers: dict[object, str] = {}
        self.libraries = frozenset(
            {library} if library else self._libraries((device or "cpu").partition(":")[0])
        )
        takes = self.libraries, self.dtypes
        self.declines = tuple(
            declined(mechanism, parameters, self._masks(), *takes, gradient=gradient)
        )

    def _libraries(self, device: str) -> set[str]:
        """Those whose arrays it takes and returns."""
        errors: dict[str, str] = {}
        for sizes in PLAIN_SIZES:
            found = set()
            for library in filter(find_spec, TRIED):
                request = _plain_request(self.mechanism, library, device, *sizes)
                errors[library] = self.tried(self.mechanism, request)
                if not errors[library]:
                    found.add(library)
            if found:
                return found
        lines = "".join(f"\n  {library}: {why}" for library, why in errors.items())
        raise TypeError(
            f"{self.name} computes {self.mechanism} of no array library; a plain call of each "
            f"fails:{lines}"
        )

    def supports(self, mechanism: Piece, request: pa.Request) -> pa.Support:
        why = self.lacks(mechanism, request)
        if not why:
            own, shapes = self._by_own_names(mechanism, dict(request.shapes))
            why = self.tried(own, replace(request, shapes=tuple(shapes.items())))
        return pa.Support.no(why) if why else pa.Support.yes(differentiable=self.gradient)

    def lacks(self, piece: Piece, request: pa.Request) -> str:
        """Why the function has nothing for such a call, by its parameters; empty where it has."""
        if reason := lacks_device(self.devices, request.device):
            return reason
        if not self._is_own(piece):
            return f"computes {self.mechanism} only"
        parameters = self.parameters
        different = self._different_options(piece)
        if different:
            known = [name for name in different if name in parameters.options]
            if known:  # Of which of several leaves it is, is not known.
                return f"takes one {', '.join(known)} only, that of {self.mechanism}"
            return f"has no parameter for the option {', '.join(different)}"
        if len(self.program.leaves) > 1 and _program(piece) != self.program:
            return f"computes {self.mechanism} only"
        inputs = self._by_own_names(piece, piece.inputs)[1].keys()
        more = sorted(inputs - self.mechanism.inputs.keys() - parameters.names)
        if more:
            return f"has no parameter for the input {', '.join(more)}"
        if request.verb.endswith("vjp") and not (
            self.gradient and request.library in DIFFERENTIATING
        ):
            return "has no gradient"
        if request.verb.startswith("extend"):
            if parameters.state is None:
                return "has no parameter for a state"
            if len(piece.program.slots) != 1:
                return "has one state, and the cache of this has several arrays"
        if request.masks - self._masks():
            return f"has no parameter for {', '.join(sorted(request.masks - self._masks()))}"
        if self.dtypes is not None and request.dtype not in self.dtypes:
            return f"does not compute in {request.dtype}"
        if request.traced or request.mapped or request.transformed:
            return "is called as it is, and not compiled or transformed"
        return ""

    def _masks(self) -> frozenset[str]:
        """The masks of a full call; with the mask of keys, lengths too."""
        masks = self.parameters.masks
        if VISIBLE in masks:
            return frozenset({"key_mask", "segment_ids", "lengths"})
        return masks | {"lengths"} if "key_mask" in masks else masks

    def _is_own(self, piece: Piece) -> bool:
        """Whether its leaves are those of the mechanism, with options of any value."""
        return [*map(type, _program(piece).leaves)] == [*map(type, self.program.leaves)]

    def _by_own_names(self, piece: Piece, x: Mapping[str, T]) -> tuple[Piece, dict[str, T]]:
        """The piece, or the mechanism where it is a group of all its leaves, and its inputs.

        A group has other names of them, as x and x2 for k and q of normalised keys and queries.
        """
        if piece == self.mechanism or len(self.program.calls) == 1:
            return piece, dict(x)
        values = self.mechanism.program.part(range(len(self.program.calls)))[1]
        names = {name: value for value, name in values.items()}
        return self.mechanism, {names[name]: each for name, each in x.items()}

    def _different_options(self, piece: Piece) -> list[str]:
        """Options that differ from those of the mechanism, and that no parameter takes.

        Of several leaves all options have to be those of the mechanism: a parameter does not say
        of which leaf it is.
        """
        own, parameters, taken = self.program.leaves, self.parameters, set[str]()
        if len(own) == 1:
            taken = {*parameters.options, *(parameters.names & piece.inputs.keys())}
            taken |= set(IN_VISIBLE) if VISIBLE in parameters.masks else set()
        different = [
            name
            for mine, other in zip(own, _program(piece).leaves, strict=True)
            for name in fields_of(mine)
            if name not in taken and getattr(mine, name) != getattr(other, name)
        ]
        return list(dict.fromkeys(different))

    def tried(self, piece: Piece, request: pa.Request) -> str:
        """Why such a call with random inputs fails; empty where it runs."""
        request = replace(request, shapes=_shortened(piece, request), differentiated=False)
        key = piece, request
        if key not in self._answers:
            self._answers[key] = self._error_of(piece, request)
        return self._answers[key]

    def _error_of(self, piece: Piece, request: pa.Request) -> str:
        library = named(request.library, None if request.device == "cpu" else request.device)
        rng = np.random.default_rng(0)
        try:
            with library.precision(request.dtype), _outside_of_jit(request.library):
                x: Arrays = {
                    name: library.array(
                        numbers_in_range(rng, piece.inputs[name], shape), request.dtype
                    )
                    for name, shape in request.shapes
                }
                return self._fault_of(piece, request, x)
        except pa.UnsupportedError as error:
            return str(error)
        except Exception as error:
            return f"raised {type(error).__name__}{_first_line_of(error)}"

    def _fault_of(self, piece: Piece, request: pa.Request, x: Arrays) -> str:
        frame = self._all_visible(piece, request, x)
        states = self._no_states(piece, request, x)
        results = self.call(piece, x, frame, *states)
        out = results[0]
        if library_of(out) != request.library:
            return f"returned {type(out).__name__}, no array of {request.library}"
        expected = tuple(piece.program.output.shape(_sizes(piece.inputs, dict(request.shapes))))
        if tuple(out.shape) != expected:
            return f"returned the shape {tuple(out.shape)}; expected {expected}"
        if request.dtype == FLOAT64 and FLOAT64 in self.promises and _is_rounded(out):
            return "computes in float32"
        if request.verb.endswith("vjp"):

            def function(*arrays: Array) -> tuple[Array, ...]:
                given = dict(zip(x, arrays, strict=False))
                return self.call(piece, given, frame, *arrays[len(x) :])

            vjp(function, [*x.values(), *states], results)
        return ""

    def _all_visible(self, piece: Piece, request: pa.Request, x: Arrays) -> Frame:
        """The frame of a request, with all keys valid and one segment."""
        like, sizes = next(iter(x.values())), _sizes(piece.inputs, dict(request.shapes))
        s = sizes["s"] if "s" in sizes else sizes["t"]
        xp, shape = namespace(like), (sizes["b"], s)
        masks: Arrays = {}
        if request.masks & {"key_mask", "lengths"}:
            masks["key_mask"] = xp.ones(shape, dtype=xp.bool, **placement(like))
        if "segment_ids" in request.masks:
            masks["segment_ids"] = xp.zeros(shape, dtype=xp.int32, **placement(like))
        return full_frame(sizes.get("t", s), s, like, **masks)

    def _no_states(self, piece: Piece, request: pa.Request, x: Arrays) -> list[Array]:
        """The state before the first token, for a request that has one."""
        if not request.verb.startswith("extend"):
            return []
        (_, pattern), *_ = piece.program.slots.values()
        sizes = _sizes(piece.inputs, dict(request.shapes))
        like = next(iter(x.values()))
        xp = namespace(like)
        dtype = xp.float64 if request.dtype == "float64" else xp.float32
        return [xp.zeros(tuple(pattern.shape(sizes)), dtype=dtype, **placement(like))]

    def call(
        self,
        piece: Piece,
        x: Mapping[str, Array],
        frame: Frame,
        past: Array | None = None,
    ) -> tuple[Array, ...]:
        """The output; after a state `past`, the output and the new state."""
        parameters, tokens = self.parameters, _tokens(piece, x)
        arrays = self.arrangement.arranged(piece.inputs, x)
        named = self._options_of(piece, x)
        named |= self._masks_of(frame, piece)
        if past is not None and parameters.state is not None:
            named[parameters.state.given] = past
            if parameters.state.wanted is not None:
                named[parameters.state.wanted] = True
        if "b" in self.arrangement.layout:
            result = self._called(arrays, named)
        else:
            result = self._called_for_each(piece, arrays, named)
        out, *more = result if isinstance(result, tuple | list) and result else (result,)
        out = self.arrangement.output(out, tokens)
        if past is None:
            return (out,)
        if not more:
            raise pa.UnsupportedError("returned no state beside its output")
        return out, more[0]

    def _options_of(self, piece: Piece, x: Mapping[str, Array]) -> dict[str, object]:
        """The options that are not the function's defaults, by its names of them.

        A function that is jitted traces what it is passed. Where it has another default than None,
        None is not passed, which is no window and the like; a scale is its number.
        """
        named, defaults = {}, self.parameters.defaults
        for option, parameter in self.parameters.options.items():
            value, is_required = getattr(leaf_or_whole(piece), option), option not in defaults
            default = defaults.get(option)
            if value is None and option == "scale" and (is_required or default is not None):
                value = x["q"].shape[-1] ** -0.5
            is_default = value is None or (type(value) is type(default) and value == default)
            if is_required or not is_default:
                named[parameter] = value
        return named

    def _require_array(self, out: Array) -> None:
        """Refuse a result of another kind, by an error that says what the function is to return."""
        axes = self.arrangement.layout
        if library_of(out) is None:
            raise pa.UnsupportedError(
                f"returned {_in_short(out)}; expected an array, or a tuple that begins with one"
            )
        if len(out.shape) != len(axes):
            raise pa.UnsupportedError(
                f"returned the shape {tuple(out.shape)}; expected the axes {axes}"
            )

    def _called(self, arrays: Mapping[str, Array], named: Mapping[str, object]) -> object:
        parameters = self.parameters
        if parameters.by_position:
            result = self.function(*(arrays[name] for name in self.mechanism.inputs), **named)
        else:
            names = parameters.inputs
            given = {names.get(name, name): array for name, array in arrays.items()} | dict(named)
            first = [given.pop(name) for name in parameters.positional if name in given]
            result = self.function(*first, **given)
        self._require_array(result[0] if isinstance(result, tuple | list) and result else result)
        return result

    def _called_for_each(
        self, piece: Piece, arrays: Mapping[str, Array], named: Mapping[str, object]
    ) -> Array:
        """The outputs of a function of one sequence."""
        has_batch = {name: piece.inputs[name].axes[0].letter == "b" for name in arrays}
        outs = []
        for i in range(max(a.shape[0] for name, a in arrays.items() if has_batch[name])):
            one = {
                name: a[min(i, a.shape[0] - 1), ...] if has_batch[name] else a
                for name, a in arrays.items()
            }
            result = self._called(one, named)
            outs.append(result[0] if isinstance(result, tuple | list) else result)
        return namespace(outs[0]).stack(outs)

    def forward(
        self, mechanism: Piece, inputs: Mapping[str, Array], frame: Frame
    ) -> tuple[Array, Residuals]:
        own, x = self._by_own_names(mechanism, inputs)
        (out,) = self.call(own, x, frame)
        return out, ()

    def step(
        self,
        mechanism: Piece,
        past: Mapping[str, Array],
        inputs: Mapping[str, Array],
        frame: Frame,
    ) -> tuple[Array, Updates]:
        ((slot, state),) = past.items()
        own, x = self._by_own_names(mechanism, inputs)
        out, new = self.call(own, x, frame, state)
        return out, {slot: pa.Replace(new)}

    def _masks_of(self, frame: Frame, piece: Piece) -> dict[str, object]:
        """The masks that the call has, for the function's parameters."""
        wanted = self.parameters.masks
        masks: dict[str, object] = {}
        if "key_mask" in wanted and frame.k_valid is not None:
            masks["key_mask"] = frame.k_valid
        if "segment_ids" in wanted and frame.k_segment is not None:
            masks["segment_ids"] = frame.k_segment
        if VISIBLE in wanted:
            causal, window = (getattr(piece, name, None) for name in IN_VISIBLE)
            masks[VISIBLE] = frame.visible(causal=causal is not False, window=window)
        return masks


def _program(piece: Piece) -> Program:
    """Its program, under names and in an order that do not depend on where its leaves are from."""
    return piece.program if len(piece.program.calls) == 1 else group_of(piece)


def _plain_request(
    mechanism: pa.Mechanism, library: str, device: str, b: int, t: int, d: int
) -> pa.Request:
    """A call with a key head and a value head for each query head, and equal widths."""
    sizes = PLAIN._replace(b=b, t=t, s=t, h=2, n=2, d=d, e=d, values_per_head=1).sizes
    shapes = tuple((name, tuple(p.shape(sizes))) for name, p in mechanism.inputs.items())
    return pa.Request("forward", library, device, "float32", shapes, frozenset())


def _shortened(piece: Piece, request: pa.Request) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The shapes of one sequence of the call, with at most `MOST_TOKENS` tokens.

    JAX compiles for each shape, so there it is all sequences.
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


def _sizes(patterns: Inputs, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """The sizes by letter; an axis that broadcasts tells nothing."""
    return {
        axis.letter: n // axis.multiple
        for name, shape in shapes.items()
        for axis, n in zip(patterns[name].axes, shape, strict=True)
        if not axis.broadcasts
    }


def _tokens(piece: Piece, x: Mapping[str, Array]) -> int:
    """How many tokens the output has."""
    shapes = {name: tuple(array.shape) for name, array in x.items()}
    sizes = _sizes(piece.inputs, shapes)
    return sizes[next(axis.letter for axis in piece.program.output.axes if axis.letter in "ts")]


def _is_rounded(out: Array) -> bool:
    """Whether an output in float64 has float32's digits only."""
    xp = namespace(out)
    return bool(xp.all(xp.astype(xp.astype(out, xp.float32), xp.float64) == out))


def _first_line_of(error: Exception) -> str:
    """Of its message; without one, where it was raised."""
    message = str(error).strip().partition("\n")[0]
    if message:
        return f": {message[:LONGEST_REASON]}"
    (*_, last) = traceback.extract_tb(error.__traceback__)
    return f" at {Path(last.filename).name}:{last.lineno}: {last.line}"


def _in_short(result: object) -> str:
    """What a result is, with the names of what it has."""
    names = f" with {', '.join(map(repr, result))}" if isinstance(result, Mapping) else ""
    return f"{type(result).__name__ if result is not None else None}{names}"


def _outside_of_jit(library: str) -> AbstractContextManager[object]:
    """Where JAX computes with numbers, also while it traces the call that asks."""
    if library != "jax":
        return nullcontext()
    import jax

    outside: AbstractContextManager[object] = jax.ensure_compile_time_eval()
    return outside
