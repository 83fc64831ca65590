"""Makes Triton's interpreter follow the arithmetic and the memory rules of a GPU.

With TRITON_INTERPRET=1 Triton runs kernels on the CPU, in NumPy. Its results differ from those of a
GPU, and it accepts kernels that are wrong on a GPU:

==================  ====================================================================
bfloat16            is stored and computed as integers
tf32 products       are computed in float32
autotuning          requires a driver, which is absent
masked loads        lanes without an `other` are 0, and undefined on a GPU
out of bounds       an access reads or writes whatever memory is at the address
programs            run in order, one at a time: a race has no effect
==================  ====================================================================

`patch_interpreter` corrects the first four for the process: undefined lanes are NaN, or the largest
integer. `checked` raises an error if an access is outside of its tensor or if two programs write
one element. It also runs the programs of a grid in another order, on which the output of a kernel
without races does not depend.

Not detected are races within a program, and effects of the number of warps.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FunctionType

import numpy as np
import triton
import triton.language as tl
from triton.runtime.autotuner import Autotuner

from precondattn_kernel_tools import Foreign

try:
    from precondattn_kernel_tools.triton_memory import (
        BFLOAT16,
        OutOfBoundsError,
        RaceError,
        Watch,
        WatchedMemory,
    )
except ModuleNotFoundError as missing:
    if missing.name != "ml_dtypes":
        raise
    raise ImportError(
        "bfloat16 on a CPU needs ml_dtypes: pip install 'precondattn[kernels]'"
    ) from missing

__all__ = ["OutOfBoundsError", "RaceError", "checked", "is_interpreting", "patch_interpreter"]

interpreter: Foreign = importlib.import_module("triton.runtime.interpreter")


def is_interpreting() -> bool:
    """Whether kernels that are defined from now on run on the CPU.

    Triton's own kernels, such as `tl.sum`, are defined when it is imported.
    """
    of_triton = isinstance(tl.sum, interpreter.InterpretedFunction)
    return of_triton and bool(triton.knobs.runtime.interpret)


def patch_interpreter() -> None:
    """Make bfloat16, tf32 and autotuning work as on a GPU in this process. Repeated calls are safe.

    Raises
    ------
    RuntimeError
        if kernels are not interpreted, because then nothing would be checked.
    """
    if not is_interpreting():
        raise RuntimeError(
            "kernels are not interpreted: TRITON_INTERPRET=1 has to be in the environment before "
            "Triton is imported"
        )
    if isinstance(interpreter._interpreter, WatchedMemory):
        return
    interpreter._interpreter = WatchedMemory(interpreter._interpreter)
    _patch_types()
    _patch_products()
    _patch_masked_loads()
    _patch_indices()
    _patch_launches(interpreter._interpreter)
    _skip_what_has_no_effect()
    _share_shapes()
    # There is no driver to measure times with. All times are equal, so the first is chosen.
    Autotuner._bench = lambda self, *args, config, **meta: 0.0


@contextmanager
def checked(seed: int | None = None) -> Iterator[None]:
    """Context in which launched kernels are checked.

    With a seed, the programs of each grid run in a random order, otherwise in order.

    Raises
    ------
    OutOfBoundsError, RaceError
        from the launch; the traceback ends at the line of the kernel.
    """
    patch_interpreter()
    memory = interpreter._interpreter
    before = memory.watch
    memory.watch = Watch(seed)
    try:
        yield
    finally:
        memory.watch = before


def _patch_launches(memory: WatchedMemory) -> None:
    """Notify the watch, if there is one, of each launch with its tensors, grid and programs."""
    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    launch, convert = executor.__call__, interpreter._implicit_cvt
    set_size, set_place = builder.set_grid_dim, builder.set_grid_idx

    def watched_launch(self: Foreign, *args: object, **kwargs: object) -> object:
        if memory.watch is not None:
            memory.watch.begin()
        with warnings.catch_warnings():
            # A GPU does not warn of overflow and NaN, as NumPy does.
            warnings.simplefilter("ignore", RuntimeWarning)
            try:
                return launch(self, *args, **kwargs)
            except interpreter.InterpreterError as error:
                first: BaseException = error
                while isinstance(first, interpreter.InterpreterError) and first.__cause__:
                    first = first.__cause__
                if isinstance(first, OutOfBoundsError | RaceError):
                    raise first from None
                raise

    def numbered(argument: object) -> Foreign:
        converted = convert(argument)
        if memory.watch is not None and hasattr(argument, "data_ptr"):
            converted.handle.data += memory.watch.number(interpreter._unwrap_tensor(argument))
        return converted

    def watched_size(self: Foreign, *size: int) -> None:
        if memory.watch is not None:
            memory.watch.set_grid(size)
        set_size(self, *size)

    def watched_place(self: Foreign, *place: int) -> None:
        set_place(self, *(place if memory.watch is None else memory.watch.set_program(place)))

    executor.__call__ = watched_launch
    interpreter._implicit_cvt = numbered
    builder.set_grid_dim, builder.set_grid_idx = watched_size, watched_place


def _patch_types() -> None:
    builder, numpy_type = interpreter.InterpreterBuilder, interpreter._get_np_dtype
    # Triton makes a table of all types in each call.
    dtypes: dict[str, np.dtype] = {tl.bfloat16.name: BFLOAT16}

    def dtype_of(dtype: Foreign) -> np.dtype:
        scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        if scalar.name not in dtypes:
            dtypes[scalar.name] = numpy_type(scalar)
        return dtypes[scalar.name]

    def cast(self: Foreign, source: Foreign, dtype: Foreign) -> Foreign:
        # Rounds to nearest, ties to even, as the hardware's conversions do.
        data = source.data.astype(dtype_of(dtype))
        return interpreter.TensorHandle(data, dtype.scalar)

    convert = builder.create_fp_to_fp

    def between_floats(self: Foreign, source: Foreign, dtype: Foreign, rounding: object) -> Foreign:
        widths = {source.dtype.scalar.primitive_bitwidth, dtype.scalar.primitive_bitwidth}
        if 8 in widths or str(rounding).endswith("RTZ"):
            return convert(self, source, dtype, rounding)
        return cast(self, source, dtype)

    interpreter._get_np_dtype = dtype_of
    builder.cast_impl = cast
    builder.create_fp_to_fp = between_floats
    builder.get_bf16 = lambda self, value: interpreter.TensorHandle(
        np.array([value], dtype=BFLOAT16), tl.bfloat16
    )


def _patch_products() -> None:
    builder = interpreter.InterpreterBuilder
    product = builder.create_dot

    def dot(
        self: Foreign, a: Foreign, b: Foreign, total: Foreign, precision: object, imprecise: object
    ) -> Foreign:
        if a.dtype.primitive_bitwidth == 8:
            return product(self, a, b, total, precision, imprecise)
        is_tf32 = str(precision).endswith("TF32")
        x, y = (_factor(factor.data, is_tf32).astype(total.data.dtype) for factor in (a, b))
        return interpreter.TensorHandle(np.matmul(x, y) + total.data, total.dtype.scalar)

    builder.create_dot = dot


def _factor(data: np.ndarray, is_tf32: bool) -> np.ndarray:
    """A factor as tensor cores read it: tf32 has the first 10 bits of a float32's fraction.

    Triton's compiler passes the float32 without rounding it, and the other bits are not read.
    """
    if not is_tf32 or data.dtype != np.float32:
        return data
    bits = np.ascontiguousarray(data).view(np.uint32)
    return (bits & np.uint32(0xFFFFE000)).view(np.float32)


def _patch_masked_loads() -> None:
    builder = interpreter.InterpreterBuilder
    load = builder.create_masked_load

    def masked_load(
        self: Foreign, pointers: Foreign, mask: Foreign, other: Foreign | None, *options: object
    ) -> Foreign:
        if other is None:
            scalar = pointers.get_element_ty()
            dtype = interpreter._get_np_dtype(scalar)
            lanes = np.full_like(pointers.data, _undefined(dtype), dtype=dtype)
            other = interpreter.TensorHandle(lanes, scalar)
        return load(self, pointers, mask, other, *options)

    builder.create_masked_load = masked_load


def _undefined(dtype: Foreign) -> bool | int | float:
    """A value that a kernel can not use unnoticed: NaN, or an index that is out of bounds."""
    if dtype == np.bool_:
        return True
    return np.iinfo(dtype).max if np.issubdtype(dtype, np.integer) else np.nan


def _patch_indices() -> None:
    """Let Triton up to 3.6 convert one-element arrays to integers, as NumPy 2.4 does not."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Foreign, scope: Foreign) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def _skip_what_has_no_effect() -> None:
    """Leave out work of Triton's interpreter that takes almost half of its time.

    Each call of a function within a kernel replaces the language's functions, as the launch has
    done. And each sum of integers is computed once more to see whether it overflows, although an
    overflow is an error in kernels with `debug` alone, which the interpreter does not set.
    """
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    executor, replace_functions = interpreter.GridExecutor, interpreter._patch_lang
    launch = executor.__call__
    replaced: set[str] = set()

    def launched(self: Foreign, *args: object, **kwargs: object) -> object:
        replaced.clear()
        return launch(self, *args, **kwargs)

    def replace_once(function: FunctionType) -> Foreign:
        modules = [v for v in function.__globals__.values() if v is tl or v is tl.core]
        names = {module.__name__ for module in modules}
        if names and names <= replaced:
            return None  # Only a launch restores the functions.
        replaced.update(names)
        return replace_functions(function)

    executor.__call__, interpreter._patch_lang = launched, replace_once


def _share_shapes() -> None:
    """Keep what follows from the shape of a block: Triton finds it again for each value."""
    begin_type, begin_value = tl.block_type.__init__, tl.tensor.__init__
    of_types: dict[tuple[int, ...], tuple[Foreign, int, str]] = {}
    of_values: dict[tuple[int, ...], tuple[Foreign, Foreign]] = {}

    def with_kept_shape(self: Foreign, element: Foreign, shape: Foreign) -> None:
        sizes = tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)
        if sizes in of_types and {type(size) for size in sizes} == {int}:
            self.element_ty = element
            self.shape, self.numel, text = of_types[sizes]
            self.name = f"<{text}, {element}>"
        else:
            begin_type(self, element, shape)
            of_types[sizes] = self.shape, self.numel, str(self.shape)

    def of_kept_shape(self: Foreign, handle: Foreign, type: Foreign) -> None:
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes in of_values:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = of_values[sizes]
        else:
            begin_value(self, handle, type)
            of_values[sizes] = self.shape, self.numel

    tl.block_type.__init__, tl.tensor.__init__ = with_kept_shape, of_kept_shape
