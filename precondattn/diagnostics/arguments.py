"""The arguments of diagnostics that examine a call: its inputs by name, and its masks."""

from __future__ import annotations

from precondattn.algebra.mechanism import Mechanism
from precondattn.arrays import Array, Arrays, is_traced, library_of, upcast
from precondattn.given import Given


def examined_inputs(
    what: str, mechanism: Mechanism, arrays: tuple[Array, ...], named: dict[str, Given]
) -> tuple[Arrays, dict[str, Given]]:
    """The inputs by name, in float32 instead of half precision, and the masks and the backend.

    Raises
    ------
    TypeError
        if `mechanism` is not a mechanism, or if an input is missing, unknown, not an array, or
        traced.
    """
    from precondattn.execution.input_names import CALL_OPTIONS, inputs_by_name

    if not isinstance(mechanism, Mechanism):
        raise TypeError(
            f"{what}: a mechanism, such as pa.Lucid(), is expected; found {mechanism!r}"
        )
    options = {name: named[name] for name in CALL_OPTIONS if name in named}
    by_name = {name: array for name, array in named.items() if name not in options}
    inputs = inputs_by_name(str(mechanism), mechanism.inputs, arrays, by_name, CALL_OPTIONS)
    for name, array in inputs.items():
        if library_of(array) is None:
            raise TypeError(f"{mechanism}: {name} must be an array; found {type(array).__name__}")
        if is_traced(array):
            raise TypeError(
                f"{what}: {name} is traced, and its entries can not be read; call it outside of "
                f"jit, compile, vmap and grad"
            )
    return {name: upcast(array) for name, array in inputs.items()}, options
