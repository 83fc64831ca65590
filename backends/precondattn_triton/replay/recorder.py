"""What a call launches, and on which arrays, written down while it runs.

Every array is one of the call's inputs, a view of one, an allocation, or the result of one of
PyTorch's operators. A call is not repeated if it

* reads an entry on the host, draws random numbers, or has a result whose shape depends on entries,
* copies between devices,
* uses an array from elsewhere, such as one that an earlier call has kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from precondattn_triton import launching
from precondattn_triton.launching import Grid, HeldKernel, Jitted

aten = torch.ops.aten
ALLOCATIONS = frozenset(
    {
        aten.empty.memory_format,
        aten.empty_strided.default,
        aten.empty_like.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
    }
)
DEPENDS_ON_ENTRIES = frozenset(
    {
        torch.Tag.data_dependent_output,
        torch.Tag.dynamic_output_shape,
        torch.Tag.nondeterministic_seeded,
    }
)

Found = TypeVar("Found")
Value = Any
"""An argument or result of an operator or a launch."""
Operator = Any
"""An overload of one of PyTorch's operators."""


class Place(NamedTuple):
    """An array as a view of one of the arrays of a recording."""

    array: int
    offset: int
    """Its first entry, in bytes after that of the array."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class MadeArray(NamedTuple):
    """An allocation or an operator's result. The inputs are numbered before them."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    is_result: bool


class RecordedLaunch(NamedTuple):
    """A launch, with places instead of arrays."""

    kernel: Jitted
    held: HeldKernel | None
    """None in Triton's interpreter."""
    grid: Grid
    arguments: tuple[Value, ...]
    constants: dict[str, Value]


class RecordedOperator(NamedTuple):
    """A call of one of PyTorch's operators, with places instead of arrays."""

    operator: Operator
    arguments: tuple[Value, ...]
    keywords: dict[str, Value]
    results: tuple[int | None, ...]
    """The numbers of new arrays; None for a result that is one of the arguments."""


Step = RecordedLaunch | RecordedOperator


class Recorder(TorchDispatchMode):  # type: ignore[misc]
    """A context in which launches and operators are recorded, besides being run."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.device = inputs[0].device
        self.made: list[MadeArray] = []
        self.steps: list[Step] = []
        self.obstacle = ""
        """Why the call can not be repeated; empty if it can."""
        self._inputs = list(inputs)
        self._of_input = {id(x): i for i, x in reversed(list(enumerate(inputs)))}
        self._of_storage: dict[int, tuple[int, int]] = {}
        """The number of the array that was made with a storage, and the address of its entries."""
        self._kept: list[Tensor] = []
        """Views of inputs, which no other object may get the identity of."""

    def __enter__(self) -> Recorder:
        launching.observer.found = self.launched
        super().__enter__()
        return self

    def __exit__(self, *error: Value) -> None:
        launching.observer.found = None
        super().__exit__(*error)

    def __torch_dispatch__(
        self,
        func: Operator,
        types: object,
        args: tuple[Value, ...] = (),
        kwargs: dict[str, Value] | None = None,
    ) -> Value:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self.obstacle:
            self._observe(func, args, kwargs, result)
        return result

    def launched(
        self,
        kernel: Jitted,
        held: HeldKernel | None,
        grid: Grid,
        arguments: tuple[Value, ...],
        constants: dict[str, Value],
    ) -> None:
        """Record a launch."""
        places = self._placed(arguments)
        self.steps.append(RecordedLaunch(kernel, held, grid, places, constants))

    def place(self, array: Tensor) -> Place | None:
        """The place of an array; None, and an obstacle, if it is from elsewhere."""
        found = self._of_input.get(id(array))
        if found is not None:
            number, start = found, self._inputs[found].data_ptr()
        else:
            known = self._of_storage.get(array.untyped_storage()._cdata)
            if known is None:
                self.obstacle = self.obstacle or "it uses an array that is not its argument"
                return None
            number, start = known
        offset = array.data_ptr() - start if array.numel() else 0
        return Place(number, offset, tuple(array.shape), array.stride(), array.dtype)

    def _observe(
        self, func: Operator, args: tuple[Value, ...], kwargs: dict[str, Value], result: Value
    ) -> None:
        given, results = list(found_in((args, kwargs), Tensor)), _listed(result)
        if not all(isinstance(r, Tensor) for r in results) or DEPENDS_ON_ENTRIES & set(func.tags):
            self.obstacle = f"{func} depends on entries"
        elif any(a.device != self.device for a in (*given, *results)):
            self.obstacle = f"{func} uses another device"
        elif func in ALLOCATIONS:
            self._make(result, is_result=False)
        elif _is_view(func, given, results):
            self._view(given, results)
        else:
            places, keywords = self._placed(args), self._placed(kwargs)
            numbers = tuple(None if any(r is a for a in given) else self._make(r) for r in results)
            called = _function_of(func, args, kwargs, results)
            self.steps.append(RecordedOperator(called, places, keywords, numbers))

    def _view(self, given: list[Tensor], results: list[Tensor]) -> None:
        """Give views of an input its number. Others are known by their storage."""
        sources = [self._of_input[id(a)] for a in given if id(a) in self._of_input]
        for result in results if sources else ():
            self._of_input[id(result)] = sources[0]
            self._kept.append(result)

    def _make(self, array: Tensor, *, is_result: bool = True) -> int:
        storage, number = array.untyped_storage(), len(self._inputs) + len(self.made)
        self._of_storage[storage._cdata] = number, array.data_ptr()
        of_array = tuple(array.shape), array.stride(), array.dtype
        self.made.append(MadeArray(*of_array, storage.nbytes(), is_result))
        return number

    def _placed(self, value: Value) -> Value:
        """A structure of arguments with places instead of arrays."""
        if isinstance(value, Tensor):
            return self.place(value)
        if type(value) in (tuple, list):
            return type(value)(self._placed(each) for each in value)
        if type(value) is dict:
            return {name: self._placed(each) for name, each in value.items()}
        return value


def _function_of(
    func: Operator, args: tuple[Value, ...], kwargs: dict[str, Value], results: list[Tensor]
) -> Operator:
    """PyTorch's function that calls this operator, which takes half as long as the overload itself.

    The overload, if there is no such function of these arguments.
    """
    function = getattr(torch, func.overloadpacket.__name__, None)
    if function is None or func._schema.is_mutable:
        return func
    try:
        again = _listed(function(*args, **kwargs))
    except (TypeError, ValueError, RuntimeError):
        return func
    described = [[(r.shape, r.stride(), r.dtype) for r in each] for each in (results, again)]
    return function if described[0] == described[1] else func


def _listed(result: Value) -> list[Value]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def found_in(value: Value, kind: type[Found]) -> Iterator[Found]:
    """All objects of a type in a structure of tuples, lists and dictionaries."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, dict):
        yield from found_in(tuple(value.values()), kind)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from found_in(each, kind)


def _is_view(func: Operator, given: list[Tensor], results: list[Tensor]) -> bool:
    """Whether an operator writes nothing, and its results are views of its arguments."""
    if func._schema.is_mutable:
        return False
    storages = {a.untyped_storage()._cdata for a in given}
    return bool(results) and all(r.untyped_storage()._cdata in storages for r in results)
