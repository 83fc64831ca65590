"""JAX's interpreter of TPU kernels, with its findings raised as errors.

The interpreter simulates the memories of a TPU, its copies and semaphores on the CPU. It fills
uninitialised memory with NaN, raises an error if a kernel reads outside of an array, and detects
unordered accesses to the same memory. It only prints or logs these; `checked` raises an error.
`checked` also runs programs along the parallel axes of a grid in a random order, on the given
number of cores.

Not detected are compiler errors, kernels that do not fit VMEM, and differences in the last bits.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

import jax
from jax.experimental.pallas import tpu as pltpu

from precondattn_kernel_tools import Foreign

__all__ = ["RaceError", "checked"]


class RaceError(RuntimeError):
    """Two accesses to the same memory, one of them a write, have no defined order."""


@contextmanager
def checked(seed: int = 0, *, cores: int = 1) -> Iterator[pltpu.InterpretParams]:
    """Context with parameters for `interpret=`, which raises at its end if a kernel had a race.

    `seed` determines the order of programs along parallel axes. With two cores, as some TPUs have,
    the cores share the programs, which takes a few times as long.

    Raises
    ------
    RaceError
        if there was a race; the accesses have been printed, or logged by newer versions.
    RuntimeError
        if no kernel has been interpreted, because then nothing was checked.
    """
    interpreter: Foreign = importlib.import_module(
        "jax._src.pallas.mosaic.interpret.interpret_pallas_call"
    )
    # The interpreter discards the findings of one kernel when the next one starts.
    states: list[Foreign] = []
    detection = interpreter.RaceDetectionState

    def recorded(*arguments: object, **options: object) -> Foreign:
        states.append(detection(*arguments, **options))
        return states[-1]

    interpreter.RaceDetectionState = recorded
    try:
        # By default, newer versions raise at the first race.
        fields = pltpu.InterpretParams.__dataclass_fields__
        continues: dict[str, str] = {"on_race": "warn"} if "on_race" in fields else {}
        yield pltpu.InterpretParams(
            **continues,
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
        interpreter.RaceDetectionState = detection
    if not states:
        raise RuntimeError("no TPU kernel has been interpreted here, so that nothing was checked")
    if races := sum(state.races_found for state in states):
        raise RaceError(f"{races} of {len(states)} kernels have a race; the output says where")
