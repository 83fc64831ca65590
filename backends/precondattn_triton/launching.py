"""Launches of compiled kernels, which are looked up once for each signature of their arguments.

    launch(kernel, grid, *arguments, **constants)       kernel[grid](*arguments, **constants)

Both do the same. The second describes every argument anew, and takes three times as long on the
host. The first keeps what Triton has compiled by all that Triton specialises a kernel on:

* a tensor's dtype, and whether its address is a multiple of 16;
* an integer's size, 32 or 64 bits, and whether it is 1 or a multiple of 16;
* each entry of a tuple in these ways;
* the values of constants, and the numbers of warps and stages;
* the current device, and Triton's settings for debugging and instrumentation.

Whatever observes Triton's launches (a hook, a profiler, a test that replaces `JITFunction.run`)
and arguments of other types, such as descriptors of tensors, are left to Triton.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from triton import knobs
from triton.runtime import driver, jit
from triton.runtime.jit import JITFunction

if TYPE_CHECKING:
    from collections.abc import Callable

Jitted = Any
"""A jitted function: a `JITFunction`, or what Triton's interpreter has in its place."""
Argument = Any
"""An argument that is not a constant: a tensor, a number, or None."""
Constant = Any
"""A constant: a number, a text or a dtype; or a number of warps or stages."""
Launched = Any
"""What Triton returns of a launch: the compiled kernel, or None where something else ran it."""
Grid = tuple[int, ...]

KEPT = 4096
"""The most signatures whose kernels are kept. All are dropped when there are more."""

_TRITONS = vars(jit)
"""The globals of Triton's own `JITFunction.run`, by which one in its place is recognised."""


def cdiv(count: int, size: int) -> int:
    """⌈count / size⌉, as `triton.cdiv`, which takes the host ten times as long."""
    return -(-count // size)


class KeptKernel(NamedTuple):
    """A compiled kernel, and the values of its constants in the order of its parameters."""

    run: Callable[..., None]
    function: int
    metadata: object
    constants: tuple[Constant, ...]


_compiled: dict[Hashable, KeptKernel] = {}


def launch(kernel: Jitted, grid: Grid, *arguments: Argument, **constants: Constant) -> None:
    """Launch a kernel. Its constants, which come last, and options such as `num_warps` are named.

    Raises
    ------
    TypeError
        if a constant is not named, or another argument is.
    """
    key = _signature(kernel, arguments, constants)
    if key is None:
        kernel[grid](*arguments, **constants)
        return
    kept = _compiled.get(key)
    if kept is None:
        _keep(key, kernel, len(arguments), constants, kernel[grid](*arguments, **constants))
        return
    x, y, z = (*grid, 1, 1)[:3]
    stream = driver.active.get_current_stream(key[1])
    # Three times None: no hook looks at the launch.
    kept.run(
        x, y, z, stream, kept.function, kept.metadata, None, None, None,
        *arguments, *kept.constants,
    )  # fmt: skip


def _signature(
    kernel: Jitted, arguments: tuple[Argument, ...], constants: dict[str, Constant]
) -> tuple[Hashable, ...] | None:
    """What a compiled kernel depends on; None if Triton has to launch it."""
    if type(kernel) is not JITFunction or kernel.pre_run_hooks or is_observed():
        return None
    try:
        described = _described(arguments)
    except TypeError:
        return None
    device = driver.active.get_current_device()
    # A jitted function has a hash of its source, which takes longer.
    return (kernel.fn, device, settings(), *described, *constants, *constants.values())


def _described(arguments: tuple[Argument, ...]) -> list[Hashable]:
    """What Triton specialises a kernel on, for each argument."""
    # The most frequent types come first, and no function is called for each of these.
    return [
        (16 if a % 16 == 0 else a == 1)
        if type(a) is int and -0x80000000 <= a <= 0x7FFFFFFF
        else (a.dtype if a.data_ptr() % 16 == 0 else (a.dtype,))
        if type(a) is Tensor
        else None
        if a is None
        else _other(a)
        for a in arguments
    ]


def _other(argument: Argument) -> Hashable:
    """What Triton specialises a kernel on, for a rarer argument than those of `_described`."""
    if isinstance(argument, tuple):
        return type(argument), *_described(argument)
    if isinstance(argument, Tensor):
        return argument.dtype if argument.data_ptr() % 16 == 0 else (argument.dtype,)
    if type(argument) is int:
        return "large", argument % 16 == 0, argument >= 2**63
    kind: type = type(argument)
    if kind in (float, bool):
        return kind
    raise TypeError


def settings() -> tuple[Hashable, ...]:
    """Triton's settings that a compiled kernel depends on."""
    return knobs.runtime.debug, knobs.compilation.instrumentation_mode


def is_observed() -> bool:
    """Whether something observes Triton's launches."""
    hooks = knobs.runtime
    return bool(
        getattr(JITFunction.run, "__globals__", None) is not _TRITONS
        or hooks.launch_enter_hook.calls
        or hooks.launch_exit_hook.calls
        or hooks.add_stages_inspection_hook
    )


def _keep(
    key: Hashable, kernel: Jitted, count: int, constants: dict[str, Constant], launched: Launched
) -> None:
    """Keep what Triton has compiled for `count` arguments and these constants."""
    parameters = kernel.params
    is_named = [p.is_constexpr for p in parameters]
    if any(is_named[:count]) or not all(is_named[count:]):
        raise TypeError(f"{kernel.__name__}: exactly its constants must be named")
    if not hasattr(launched, "packed_metadata"):
        return
    values = [constants.get(p.name, p.default) for p in parameters[count:]]
    if len(_compiled) >= KEPT:
        _compiled.clear()
    _compiled[key] = KeptKernel(
        launched.run, launched.function, launched.packed_metadata, tuple(values)
    )
