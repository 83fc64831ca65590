"""JAX's interpreter of TPU kernels, with its findings as errors.

The interpreter has the memories of a TPU, their copies and semaphores, and runs kernels on the CPU.
It fills memory that nobody wrote with NaN, raises where a kernel reads beyond an array, and notes
where two accesses of the same memory have no order. It says so in print, and goes on: `checked`
makes an error of it, and runs programs along the parallel axes of a grid in any order, on as many
cores as it is told.

What stays hidden: what the compiler makes of a kernel, whether it fits VMEM, and the last bits.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu

__all__ = ["RaceError", "checked"]


class RaceError(RuntimeError):
    """Two accesses of the same memory, one of them a write, have no order."""


@contextmanager
def checked(seed: int = 0, *, cores: int = 1) -> Iterator[Any]:
    """Parameters for `interpret=`; when it ends, no kernel that ran with them may have had a race.

    `seed` is for the order of programs along parallel axes. With two cores, as some TPUs have,
    these share the programs, which takes a few times as long.

    Raises
    ------
    RaceError
        where a race was found; what accessed what has been printed.
    RuntimeError
        where no kernel has been interpreted, for then nothing was checked.
    """
    interpreter: Any = importlib.import_module(
        "jax._src.pallas.mosaic.interpret.interpret_pallas_call"
    )
    # The interpreter forgets the findings of one kernel when the next one starts.
    states: list[Any] = []
    made = interpreter.RaceDetectionState

    def noted(*arguments: Any, **options: Any) -> Any:
        states.append(made(*arguments, **options))
        return states[-1]

    interpreter.RaceDetectionState = noted
    try:
        yield pltpu.InterpretParams(
            detect_races=True,
            uninitialized_memory="nan",
            out_of_bounds_reads="raise",
            random_seed=seed,
            num_cores_or_threads=cores,
        )
        jax.effects_barrier()
    except BaseException:
        pltpu.reset_tpu_interpret_mode_state()
        raise
    finally:
        interpreter.RaceDetectionState = made
    if not states:
        raise RuntimeError("no TPU kernel has been interpreted here, so that nothing was checked")
    if races := sum(state.races_found for state in states):
        raise RaceError(f"{races} of {len(states)} kernels have a race; the output says where")
