"""The check `threads`: thread counts of the library, and calls from several threads."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any

from precondattn_conformance.case import Case
from precondattn_conformance.checks.check import VJP, Check, Measured, Trial
from precondattn_conformance.disagreement import DisagreementError

SECONDS = 120.0
"""Seconds after which concurrent calls count as hanging."""

Result = tuple[Any, dict[str, Any]]


class Threads(Check):
    """Results depend neither on the library's number of threads nor on calls in other threads.

    PyTorch computes with 1, 2 and 4 threads, other libraries with as many as they have. For each
    count, three Python threads call at the same time, two with the same inputs and one with others.
    The sequences are long enough for the library to divide its work. A call that does not return is
    a failure.
    """

    name = "threads"
    snippet = f"# The check calls it in threads.\n{VJP}"

    def applies(self, case: Case) -> bool:
        return case.layout.name == "threads"

    def run(self, trial: Trial) -> Measured:
        trial.require_outputs()
        expected, pairs = trial.expected, {}  # The oracle does not run during the calls.
        other = trial.arrays(trial.reversed_inputs)
        alone = trial.numpy(trial.results(other)[0])
        for count in trial.library.thread_counts:
            with trial.library.threads(count):
                first, second, third = _at_once(
                    trial, count, trial.results, trial.results, lambda: trial.results(other)
                )
            by = f"with {count or 'all'} thread{'' if count == 1 else 's'}"
            for which, (out, gradients) in (("", first), (" again", second)):
                pairs[f"the output{which} {by}"] = trial.numpy(out), expected.out
                pairs |= trial.pairs_of_gradients(gradients, f"vjp{which} {by}")
            pairs[f"the output for other inputs {by}"] = trial.numpy(third[0]), alone
        trial.require_purity()
        return trial.agree(pairs)


def _at_once(trial: Trial, count: int | None, *calls: Callable[[], Result]) -> list[Result]:
    """The results of concurrent calls, each in its own thread."""
    results: dict[int, Result] = {}
    errors: list[BaseException] = []
    all_are_ready = threading.Barrier(len(calls))

    def run(i: int) -> None:
        try:
            with trial.library.precision(trial.case.dtype):  # JAX sets it per thread.
                all_are_ready.wait()
                results[i] = calls[i]()
        except BaseException as error:
            errors.append(error)

    threads = [
        # A copied context includes NumPy's treatment of warnings. The thread is a daemon, so that
        # the process can end if it hangs.
        threading.Thread(target=contextvars.copy_context().run, args=(run, i), daemon=True)
        for i in range(len(calls))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    if errors:
        raise errors[0]
    if len(results) < len(calls):
        of = "" if count is None else f" of the library's {count} threads"
        raise DisagreementError(
            f"{len(calls) - len(results)} of {len(calls)} calls at once{of} did not return "
            f"in {SECONDS:.0f} s"
        )
    return [results[i] for i in range(len(calls))]
