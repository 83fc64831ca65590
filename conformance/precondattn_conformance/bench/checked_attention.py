"""The fixture `checked_attention`: a call that was compared with the oracle, ready to be timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from precondattn.arrays import Arrays
from precondattn.backend import UnsupportedError
from precondattn.json_types import JsonObject
from precondattn_conformance import libraries
from precondattn_conformance.bench.benchmark_cases import BenchmarkRow
from precondattn_conformance.bench.correct import UncheckedError, WrongResultError
from precondattn_conformance.bench.measure import our_run, peer_run
from precondattn_conformance.bench.paired import Run
from precondattn_conformance.bench.plan import empty_row

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture


@contextmanager
def checked_attention(
    row: BenchmarkRow, benchmark: BenchmarkFixture
) -> Iterator[Callable[[], Arrays]]:
    """The call of a row, while the dtype of the row is enabled in its library.

    A row that can not run is skipped. A wrong result fails the test before anything is timed; a
    wrong peer is skipped, because it is no fault of what is compared with it.
    """
    import pytest

    library = libraries.named(row.columns.library, row.columns.device)
    benchmark.group = row.columns.group
    with library.precision(row.case.dtype):
        try:
            run, information = _prepared(row)
        except (UnsupportedError, UncheckedError) as reason:
            pytest.skip(str(reason))
        except WrongResultError as wrong:
            benchmark.skipped = True  # Otherwise the fixture warns that it was not used.
            text = f"{wrong}: a wrong result is not timed"
            if row.peer is not None:
                pytest.skip(text)
            pytest.fail(text, pytrace=False)
        except Exception:
            benchmark.skipped = True
            raise
        benchmark.extra_info.update(information)

        def call() -> Arrays:
            run.reset()
            return run.call()

        yield call


def _prepared(row: BenchmarkRow) -> tuple[Run, JsonObject]:
    """The run of a row after its check, and what is saved with its times."""
    case, peer, device = row.case, row.peer, row.columns.device
    described = empty_row(case, row.backend, device)
    if peer is None:
        run, checked, first = our_run(case, row.backend, device, described)
    else:
        run, checked, first = peer_run(peer, case, row.backend, device)
    return run, {
        "case": case.name,
        "computes": row.computed,
        "is_peer": peer is not None,
        "backends": described.backends,
        "device": described.device,
        "checked": checked.what,
        "error": checked.error,
        "bound": checked.bound,
        "first_call_seconds": first,
    }
