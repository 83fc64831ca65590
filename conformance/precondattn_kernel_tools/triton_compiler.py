"""Compiles Triton kernels without a GPU: do they compile, and do they fit?

    python -m precondattn_kernel_tools.triton_compiler MODULE --target sm_90 --save FILE

`MODULE.variants(target)` yields the variants that a package ships for a target. Each is compiled to
machine code, and its resources are read from the assembler's log: registers and spilled bytes of a
thread, shared memory of a block. A variant that spills more than its limit, or needs more shared
memory than a block may have, is a failure.

It has to run in a separate process without TRITON_INTERPRET=1, with which kernels are interpreted.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from precondattn_kernel_tools import Foreign
from precondattn_kernel_tools.ahead_of_time import (
    CompileTask,
    key_of,
    parsed,
    print_names,
    run,
    selected,
    variants_of,
)
from precondattn_kernel_tools.resources import SHARED_LIMITS, Resources, measured
from precondattn_kernel_tools.triton_code import code_of

Place = tuple[int, ...]
"""The place of an entry of a tuple: the number of the argument, and the entry's number in it."""
ArgumentType = str | tuple["ArgumentType", ...]
"""Triton's name of a type; a tuple of these for a tuple of arguments."""


class Variant(NamedTuple):
    """One variant in which a kernel is shipped."""

    name: str
    """A name that is unique in the module."""
    function: Foreign
    """The result of `triton.jit`."""
    signature: Mapping[str, ArgumentType]
    """The type of each argument by name: "*bf16" (a pointer), "i32", "fp32" …; or a tuple of the
    types of its entries, of which constants are "constexpr"."""
    constants: Mapping[str | Place, object]
    """The other arguments and entries, which are compile-time constants."""
    options: Mapping[str, int]
    """The options num_warps and num_stages."""
    spill_limit: int = 0
    """The number of bytes that a thread may spill."""
    divisible: Sequence[str | Place] = ()
    """Arguments and entries that are multiples of 16, for which Triton specialises a kernel."""


def compile_variant(variant: Variant, target: str) -> Resources:
    """Compile a variant for a target such as "sm_90" or "gfx942"; a compiler error is a failure.

    Raises
    ------
    ValueError
        if the target is not one of `SHARED_LIMITS`.
    """
    if target not in SHARED_LIMITS:
        raise ValueError(f"target has to be one of {', '.join(SHARED_LIMITS)}, not {target!r}")
    limit = variant.spill_limit
    return measured(variant.name, target, limit, lambda: compiled(variant, target))


def compiled(variant: Variant, target: str) -> Foreign:
    """Triton's compiled kernel, with its assembly and machine code in `asm`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = variant.function.arg_names
    described = [*variant.signature, *variant.constants]
    if missing := [name for name in names if name not in described]:
        raise ValueError(f"neither a type nor a value is given for {', '.join(missing)}")
    arguments = [name for name in (*described, *variant.divisible) if isinstance(name, str)]
    if unknown := [name for name in arguments if name not in names]:
        raise ValueError(f"the kernel has no argument {', '.join(unknown)}")
    divisible = {(names.index(at),) if isinstance(at, str) else at for at in variant.divisible}
    source = ASTSource(
        fn=variant.function,
        signature={
            name: "constexpr" if name in variant.constants else variant.signature[name]
            for name in names
        },
        constexprs=dict(variant.constants),
        # As at run time, where the address of a new tensor is a multiple of 16.
        attrs={
            place: [["tt.divisibility", 16]]
            for i, name in enumerate(names)
            for place, kind in _entries((i,), variant.signature.get(name, "constexpr"))
            if place in divisible or kind.startswith("*")
        },
    )
    if target.startswith("gfx"):
        machine = GPUTarget("hip", target, 64)
    else:
        machine = GPUTarget("cuda", int(target.removeprefix("sm_")), 32)
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.always_compile = True  # A cached kernel would take no time.
        return triton.compile(source, target=machine, options=dict(variant.options))


def _entries(place: Place, kind: ArgumentType) -> Iterator[tuple[Place, str]]:
    """The place and type of an argument, or of each entry of a tuple."""
    if isinstance(kind, str):
        yield place, kind
    else:
        for number, entry in enumerate(kind):
            yield from _entries((*place, number), entry)


def key_of_variant(variant: Variant, target: str) -> str:
    """The key of a variant (`ahead_of_time.py`); empty if its code can not be read."""
    import triton

    try:
        code = code_of(variant.function)
    except (AttributeError, OSError, TypeError, ValueError):
        return ""
    names = variant.function.arg_names

    def numbered(at: str | Place) -> int | Place:
        return names.index(at) if isinstance(at, str) else at

    def order(number: int | Place) -> Place:
        return (number,) if isinstance(number, int) else number

    signature, constants = (
        sorted(((numbered(at), value) for at, value in of.items()), key=lambda pair: order(pair[0]))
        for of in (variant.signature, variant.constants)
    )
    divisible = sorted(map(numbered, variant.divisible), key=order)
    options = sorted(variant.options.items())
    limits = (variant.spill_limit, target, triton.__version__)
    return key_of(code, signature, constants, divisible, options, *limits)


@functools.cache
def _variants_of(module: str, target: str) -> dict[str, Variant]:
    return variants_of(module, target)


def _compile_named(module: str, name: str, target: str) -> Resources:
    """Compile a variant given by name, since kernels can not be pickled for another process."""
    return compile_variant(_variants_of(module, target)[name], target)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, print a line for each variant, and return 1 if one of them fails."""
    import triton

    parser, options = parsed("Triton", SHARED_LIMITS, "sm_90, gfx942", arguments)
    if triton.knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set: kernels would be interpreted, not compiled")
    pairs = selected(parser, options)
    if options.list:
        print_names(pairs)
        return 0
    tasks = [
        CompileTask(
            variant.name,
            target,
            key_of_variant(variant, target),
            (options.module, variant.name, target),
        )
        for variant, target in pairs
    ]
    return run(options, _compile_named, tasks, {"triton": triton.__version__})


if __name__ == "__main__":
    sys.exit(main())
