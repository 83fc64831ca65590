"""A backend made from a function: `backend_from_function`.

The limits of the function are found by calling it. Each kind of call (dtype, heads, widths, masks,
number of tokens, with or without a gradient or a state) is first tried with random inputs. If that
raises an error, the backend declines such calls with the error as the reason, which reports show.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TypeVar

import precondattn as pa
from precondattn.algebra.group import group_of
from precondattn.algebra.options import fields_of
from precondattn.algebra.piece import Piece
from precondattn.algebra.program import Program
from precondattn.arrays import DIFFERENTIATING, Array, Residuals, library_of, namespace
from precondattn.cache import Updates
from precondattn.dispatch.discovery import discover
from precondattn.frame import Frame
from precondattn.installed import is_installed
from precondattn.method_backend import MethodRunner
from precondattn_conformance.functions.arrangement import Arrangement, width
from precondattn_conformance.functions.declined import declined
from precondattn_conformance.functions.parameters import (
    IN_VISIBLE,
    VISIBLE,
    Function,
    Parameters,
    State,
    leaf_or_whole,
)
from precondattn_conformance.functions.trial import (
    plain_request,
    reason_against,
    shortened,
    sizes_of,
)

T = TypeVar("T")

TRIED = ("torch", "jax", "numpy")
"""The array libraries that a function may use, in the order in which they are tried."""
PLAIN_SIZES = ((2, 5, 8), (1, 64, 64), (1, 128, 128))
"""Sequences, tokens and width of the calls that determine the libraries. The first sizes detect
most errors, but many kernels accept only larger ones."""


def backend_from_function(
    function: Function,
    mechanism: str | pa.Mechanism,
    *,
    name: str | None = None,
    library: str | None = None,
    layout: str = "bthd",
    heads: str = "grouped",
    multiple: int = 1,
    widths: str = "any",
    dtypes: Iterable[str] | None = None,
    gradient: bool = True,
    inputs: Mapping[str, str] | None = None,
    options: Mapping[str, str] | None = None,
    state: State | tuple[str, str] | None = None,
    device: str | None = None,
    devices: Iterable[str] = (),
    promises: frozenset[str] = pa.CONVENTIONS,
) -> FunctionBackend:
    """Make a backend that computes one mechanism by a function, for the suite and for `backend=`.

    Parameters
    ----------
    function : callable
        Takes the mechanism's inputs by the names of its parameters (q, k, v, g, beta, …; also
        query, key, value), and returns the output (b, t, h, e), alone or first in a tuple. A
        parameter with the name of an option of the mechanism (scale, causal, …) gets the option, or
        the input that the option adds (bias, sink). The parameters `key_mask` (b, s), `segment_ids`
        (b, s) and `visible` (b or 1, 1, t, s: which query sees which key) get masks;
        `initial_state` with `output_final_state` gets the recurrent state.
    mechanism : str or Mechanism
        An expression, such as `"kda"` or `"softmax"`.
    name : str, optional
        The name of the backend; by default that of the function.
    library : {"torch", "jax", "numpy"}, optional
        The library of its arrays. By default it is called with arrays of each library to find out.
    layout : str
        The order of the axes: `"bthd"`, `"bhtd"`, or `"thd"` and `"htd"` for one sequence per call.
    heads : {"grouped", "equal"}
        "equal": it requires as many key and value heads as query heads, so they are repeated.
    multiple : int
        It requires a multiple of this many tokens; zeros are appended, and their output is cut off.
    widths : {"any", "equal"}
        "equal": it requires values as wide as keys; zeros are appended to narrower ones, and their
        output is cut off. Calls with wider values are declined.
    dtypes : iterable of str, optional
        The dtypes that it supports; by default they are found by calling it.
    gradient : bool
        Whether the framework's automatic differentiation differentiates it.
    inputs, options : mapping, optional
        The function's names of inputs and options that differ from the mechanism's.
    state : State or (str, str), optional
        The parameter for the state before the call, and the one that requests the state after it.
    device : str, optional
        The device on which it is called to find the library, in that library's name; by default the
        CPU.
    devices : iterable of str, optional
        The only kinds of devices it runs on, such as `"cuda"`; any by default.
    promises : set of str
        The conventions of `pa.CONVENTIONS` that it keeps. Results that depend on others are not
        compared.

    Raises
    ------
    TypeError
        if an input has no parameter, the function requires an argument that is not an input, or a
        plain call fails with arrays of every library.
    ValueError
        for an invalid layout, heads or multiple, and for unknown names.

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
    arrangement = Arrangement(layout, heads, multiple, widths)
    return FunctionBackend(
        *(function, parsed, name or _name_of(function), library, parameters, arrangement),
        None if dtypes is None else frozenset(dtypes),
        gradient=gradient,
        device=device,
        devices=devices,
        promises=promises,
    )


def lacks_device(devices: Collection[str], device: str) -> str:
    """The reason why a function for these kinds of devices can not run on another; or empty."""
    if not devices or device.partition(":")[0] in devices:
        return ""
    return f"needs arrays on {' or '.join(sorted(devices))}; found {device}"


def _name_of(function: Function) -> str:
    """The function's name, changed if another backend has it, such as `reference` or `torch`."""
    while isinstance(function, partial):
        function = function.func
    name = str(getattr(function, "__name__", type(function).__name__))
    name = "function" if name == "<lambda>" else name
    taken = {backend.name for backend in discover().backends}
    return f"{name}_function" if name in taken else name


class FunctionBackend(pa.Backend):
    """A backend made by `backend_from_function`."""

    only_by_name = True
    registered_by = ""
    """Code that registers the backend, for reproducing a failure."""

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
        takes = parameters, self._masks(), self.libraries, self.dtypes
        self.declines = tuple(declined(mechanism, *takes, gradient=gradient))

    def _libraries(self, device: str) -> set[str]:
        """The libraries whose arrays the function takes and returns."""
        errors: dict[str, str] = {}
        for sizes in PLAIN_SIZES:
            found = set()
            for library in filter(is_installed, TRIED):
                request = plain_request(self.mechanism, library, device, *sizes)
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

    def prepare(self, piece: Piece, request: pa.Request) -> pa.Runner | str:
        reason = self.refusal(piece, request)
        return reason or MethodRunner(self, piece, differentiable=self.gradient)

    def refusal(self, piece: Piece, request: pa.Request) -> str:
        """The reason why the function does not support such a call; empty if it does."""
        if reason := self.lacks(piece, request):
            return reason
        own, shapes = self._by_own_names(piece, dict(request.shapes))
        return self.tried(own, replace(request, shapes=tuple(shapes.items())))

    def lacks(self, piece: Piece, request: pa.Request) -> str:
        """The reason why the function has no parameters for such a call; empty if it has them."""
        if reason := lacks_device(self.devices, request.device):
            return reason
        if not self._is_own(piece):
            return f"computes {self.mechanism} only"
        parameters = self.parameters
        different = self._different_options(piece)
        if different:
            taken = [name for name in different if name in parameters.options]
            if taken:  # Its leaf is not known if there are several.
                return f"takes one {', '.join(taken)} only, that of {self.mechanism}"
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
                return "has one state, but this cache has several arrays"
        if request.masks - self._masks():
            return f"has no parameter for {', '.join(sorted(request.masks - self._masks()))}"
        if self.dtypes is not None and request.dtype not in self.dtypes:
            return f"does not compute in {request.dtype}"
        if request.traced or request.mapped or request.transformed:
            return "is called as it is, and not compiled or transformed"
        return ""

    def _masks(self) -> frozenset[str]:
        """The masks of a full call. A function with a mask of keys also supports lengths."""
        masks = self.parameters.masks
        if VISIBLE in masks:
            return frozenset({"key_mask", "segment_ids", "lengths"})
        return masks | {"lengths"} if "key_mask" in masks else masks

    def _is_own(self, piece: Piece) -> bool:
        """Whether a piece's leaves are those of the mechanism, with options of any value."""
        return [*map(type, _program(piece).leaves)] == [*map(type, self.program.leaves)]

    def _by_own_names(self, piece: Piece, x: Mapping[str, T]) -> tuple[Piece, dict[str, T]]:
        """The piece and its inputs; a group of all leaves is replaced by the mechanism.

        A group has other names for the inputs, such as x and x2 for k and q of normalised keys and
        queries.
        """
        if piece == self.mechanism or len(self.program.calls) == 1:
            return piece, dict(x)
        values = self.mechanism.program.part(range(len(self.program.calls)))[1]
        names = {name: value for value, name in values.items()}
        return self.mechanism, {names[name]: each for name, each in x.items()}

    def _different_options(self, piece: Piece) -> list[str]:
        """Options that differ from the mechanism's and that no parameter takes.

        With several leaves, all options must be the mechanism's, since a parameter does not say to
        which leaf it belongs.
        """
        leaves, parameters, taken = self.program.leaves, self.parameters, set[str]()
        if len(leaves) == 1:
            taken = {*parameters.options, *(parameters.names & piece.inputs.keys())}
            taken |= set(IN_VISIBLE) if VISIBLE in parameters.masks else set()
        different = [
            name
            for mine, other in zip(leaves, _program(piece).leaves, strict=True)
            for name in fields_of(mine)
            if name not in taken and getattr(mine, name) != getattr(other, name)
        ]
        return list(dict.fromkeys(different))

    def tried(self, piece: Piece, request: pa.Request) -> str:
        """The reason why such a call with random inputs fails; empty if it runs."""
        request = shortened(piece, request)
        key = piece, request
        if key not in self._answers:
            self._answers[key] = reason_against(self.call, *key, promises=self.promises)
        return self._answers[key]

    def call(
        self,
        piece: Piece,
        x: Mapping[str, Array],
        frame: Frame,
        past: Array | None = None,
    ) -> tuple[Array, ...]:
        """The output; with a state `past`, the output and the new state."""
        parameters, arrangement = self.parameters, self.arrangement
        d, e = (width(piece.inputs, x, letter) for letter in "de")
        arrays = arrangement.arranged(piece.inputs, x)
        named = self._options_of(piece, x)
        named |= self._masks_of(frame, piece)
        if past is not None and parameters.state is not None:
            ((_, slot),) = piece.program.slots.values()
            named[parameters.state.given] = arrangement.widened(slot, past, d)
            if parameters.state.wanted is not None:
                named[parameters.state.wanted] = True
        if "b" in arrangement.layout:
            result = self._called(arrays, named)
        else:
            result = self._called_for_each(piece, arrays, named)
        out, *more = result if isinstance(result, tuple | list) and result else (result,)
        out = arrangement.output(out, _tokens(piece, x))
        out = arrangement.narrowed(piece.program.output, out, e)
        if past is None:
            return (out,)
        if not more:
            raise pa.UnsupportedError("returned no state beside its output")
        return out, arrangement.narrowed(slot, more[0], e)

    def _options_of(self, piece: Piece, x: Mapping[str, Array]) -> dict[str, object]:
        """The options that differ from the function's defaults, by the function's names.

        A jitted function traces its arguments. If the function's default is not None, then None (no
        window, for example) is not passed. A scale is passed as its number.
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
        """Raise an error for a result that is not an array, saying what has to be returned."""
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
            by_parameter = {names.get(name, name): array for name, array in arrays.items()} | dict(
                named
            )
            by_position = [
                by_parameter.pop(name) for name in parameters.positional if name in by_parameter
            ]
            result = self.function(*by_position, **by_parameter)
        self._require_array(result[0] if isinstance(result, tuple | list) and result else result)
        return result

    def _called_for_each(
        self, piece: Piece, arrays: Mapping[str, Array], named: Mapping[str, object]
    ) -> Array:
        """The outputs of a function that takes one sequence, for every sequence."""
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
        own_piece, x = self._by_own_names(mechanism, inputs)
        (out,) = self.call(own_piece, x, frame)
        return out, ()

    def step(
        self,
        mechanism: Piece,
        past: Mapping[str, Array],
        inputs: Mapping[str, Array],
        frame: Frame,
    ) -> tuple[Array, Updates]:
        ((slot, state),) = past.items()
        own_piece, x = self._by_own_names(mechanism, inputs)
        out, new = self.call(own_piece, x, frame, state)
        return out, {slot: pa.Replace(new)}

    def _masks_of(self, frame: Frame, piece: Piece) -> dict[str, object]:
        """The masks of the call, by the function's parameters."""
        taken = self.parameters.masks
        masks: dict[str, object] = {}
        for name, field in (("key_mask", "k_valid"), ("segment_ids", "k_segment")):
            if name in taken and getattr(frame, field) is not None:
                masks[name] = getattr(frame, field)
        if VISIBLE in taken:
            causal, window = (getattr(piece, name, None) for name in IN_VISIBLE)
            masks[VISIBLE] = frame.visible(causal=causal is not False, window=window)
        return masks


def _program(piece: Piece) -> Program:
    """The piece's program in normal form, independent of where its leaves come from."""
    return piece.program if len(piece.program.calls) == 1 else group_of(piece)


def _tokens(piece: Piece, x: Mapping[str, Array]) -> int:
    """The number of tokens of the output."""
    shapes = {name: tuple(array.shape) for name, array in x.items()}
    sizes = sizes_of(piece.inputs, shapes)
    return sizes[next(axis.letter for axis in piece.program.output.axes if axis.letter in "ts")]


def _in_short(result: object) -> str:
    """A short description of a result, with the names that it contains."""
    names = f" with {', '.join(map(repr, result))}" if isinstance(result, Mapping) else ""
    return f"{type(result).__name__ if result is not None else None}{names}"
