"""A method of kernels whose calls are repeated from their third one on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import Tensor

from precondattn.arrays import is_captured
from precondattn.limits import KEPT
from precondattn_triton.replay.program import LaunchProgram, Result
from precondattn_triton.replay.recorder import Recorder
from precondattn_triton.replay.signature import Argument, Signature, signature_of

Method = Callable[..., Result]
"""A method of kernels with its mechanism: it takes arrays by name, a frame, residuals, arrays."""


class ReplayedMethod:
    """A method that is recorded at the second call with a signature, and then repeated.

    The first call is not recorded: signatures that change with each token of a cache would be
    recorded in vain. Nor is a call that a CUDA graph captures.
    """

    def __init__(
        self,
        method: Method,
        launching: Callable[[tuple[Argument, ...]], AbstractContextManager[object]],
    ) -> None:
        self._method, self._launching = method, launching
        self._programs: dict[Signature, LaunchProgram] = {}
        self._seen: set[Signature] = set()

    def __call__(self, *arguments: Argument) -> Result:
        found = signature_of(arguments)
        with self._launching(arguments):
            if found is None:
                return self._method(*arguments)
            signature, inputs = found
            program = self._programs.get(signature)
            if program is None:
                return self._first(signature, inputs, arguments)
            return self._method(*arguments) if program.obstacle else program.run(inputs)

    def _first(
        self, signature: Signature, inputs: list[Tensor], arguments: tuple[Argument, ...]
    ) -> Result:
        """Run the first or the second call with a signature; the second is recorded."""
        if is_captured(inputs[0]):  # A check that is left out then would be missing in the program.
            return self._method(*arguments)
        if signature not in self._seen:
            if len(self._seen) >= KEPT:
                self._seen.clear()
            self._seen.add(signature)
            return self._method(*arguments)
        recorder = Recorder(inputs)
        with recorder:
            result = self._method(*arguments)
        if len(self._programs) >= KEPT:
            self._programs.clear()
        self._programs[signature] = LaunchProgram(recorder, result)
        return result
