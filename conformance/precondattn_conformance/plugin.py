"""The pytest plugin: the suite as tests, for anyone's CI.

    pytest --pyargs precondattn_conformance --precondattn-backend NAME

Its flags are those of `precondattn conformance`. Without any of them it does nothing, and imports
the standard library only, because every pytest run in an environment with precondattn loads it.

    pytest --benchmark-only FILE

Tests that are decorated with `benchmark_cases` get their rows, and `checked_attention`, from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

    from precondattn.arrays import Arrays
    from precondattn.json_types import JsonObject
    from precondattn_conformance.bench.benchmark_cases import BenchmarkRow
    from precondattn_conformance.pytest_run import PytestRun


MANY = {
    "backend": "compare this backend with the oracle (repeat for helpers, in order of preference)",
    "library": "only this array library (repeat for several)",
    "mechanism": "only this mechanism or piece, an expression (repeat for several)",
    "check": "only this check, such as outputs or gradients (repeat for several)",
    "dtype": "only this dtype (repeat for several)",
    "case": "only this case, by its id (repeat for several)",
    "declines": 'what the backend declines on purpose: "float64: why" (repeat for several)',
}
ONE = {
    "level": "how much to run: smoke (the default), full or stress",
    "device": "the device of the arrays, as the array library names it",
    "xfail": "a file of cases that are expected to fail: a pattern of ids, #, and the reason",
    "skip": "a file of cases that are not run: a pattern of ids, #, and the reason",
    "timeout": "seconds after which a case counts as hanging (300)",
    "record": "write a JSON record of the run to this file",
    "html": "write an HTML page of the run to this file",
}
HERE = "in_process"
Flag = Any
"""What the command line gave for a flag: a text, several, or nothing."""
CHECKED, BENCHMARKED = "checked_attention", "precondattn_benchmark"
"""The fixture and the mark of a test that `benchmark_cases` decorates."""
NAMES = {"library": "libraries", "mechanism": "mechanisms", "check": "checks", "dtype": "dtypes"}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("precondattn", "precondattn: conformance of attention backends")
    for name, text in {**MANY, **ONE}.items():
        action = {"action": "append", "default": []} if name in MANY else {}
        group.addoption(f"--precondattn-{name}", dest=f"precondattn_{name}", help=text, **action)
    group.addoption(
        "--precondattn-in-process",
        dest=f"precondattn_{HERE}",
        action="store_true",
        help="run the cases in pytest's own process, where a debugger works and a crash ends all",
    )
    benchmarks = parser.getgroup("precondattn-benchmark", "precondattn: calls for pytest-benchmark")
    benchmarks.addoption(
        "--precondattn-benchmark-device",
        help="the device of the arrays of `benchmark_cases`, such as cuda (cpu)",
    )
    benchmarks.addoption(
        "--precondattn-benchmark-quick",
        action="store_true",
        help="tiny sizes in place of those of `benchmark_cases`, to see whether a file runs",
    )


def _given(config: pytest.Config, name: str) -> Flag:
    return config.getoption(f"precondattn_{name}")


def _is_active(config: pytest.Config) -> bool:
    return any(_given(config, name) for name in (*MANY, *ONE))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{BENCHMARKED}: made by `benchmark_cases`")
    if _is_active(config):
        config.pluginmanager.register(_run_of(config), "precondattn-run")


def _run_of(config: pytest.Config) -> PytestRun:
    """The plugin of a run with flags. It imports the suite."""
    from precondattn_conformance.pytest_run import PytestRun
    from precondattn_conformance.session import Session

    many: dict[str, Flag] = {NAMES.get(name, name): tuple(_given(config, name)) for name in MANY}
    seconds = _given(config, "timeout")
    timeout: dict[str, Flag] = {"timeout": float(seconds)} if seconds else {}
    session = Session(
        **{"ids" if name == "case" else name: chosen for name, chosen in many.items()},
        level=_given(config, "level") or "smoke",
        device=_given(config, "device"),
        xfail=_given(config, "xfail"),
        skip=_given(config, "skip"),
        **timeout,
        jobs=0 if _given(config, HERE) else 1,
    )
    return PytestRun(session, _given(config, "record"), _given(config, "html"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Without a flag the suite's test has no cases."""
    if "precondattn_case" in metafunc.fixturenames and not _is_active(metafunc.config):
        metafunc.parametrize("precondattn_case", [])
    mark = metafunc.definition.get_closest_marker(BENCHMARKED)
    if mark is not None or CHECKED in metafunc.fixturenames:
        _give_rows(metafunc, mark)


ROWS: pytest.StashKey[dict[tuple[str, ...], BenchmarkRow]] = pytest.StashKey()
"""The rows of the session's tests, by their parameters."""


def _give_rows(metafunc: pytest.Metafunc, mark: pytest.Mark | None) -> None:
    """Give a test the rows that its decorator requests."""
    name = metafunc.definition.name
    if mark is None:
        raise pytest.Collector.CollectError(
            f"{name} takes {CHECKED}, so it has to be decorated with `benchmark_cases(...)`"
        )
    if CHECKED not in metafunc.fixturenames:
        raise pytest.Collector.CollectError(
            f"{name} is decorated with `benchmark_cases`, so it has to take the fixtures "
            f"benchmark and {CHECKED}"
        )
    from precondattn_conformance.bench.benchmark_cases import rows_of

    config = metafunc.config
    device = config.getoption("precondattn_benchmark_device")
    quick = config.getoption("precondattn_benchmark_quick")
    try:
        rows = rows_of(mark.args[0], device, quick=quick)
    except ValueError as error:
        raise pytest.Collector.CollectError(str(error)) from None
    config.stash.setdefault(ROWS, {}).update({row.columns: row for row in rows})
    lacking = [(pytest.mark.skip(reason=row.lack),) if row.lack else () for row in rows]
    metafunc.parametrize(
        rows[0].columns._fields,
        [
            pytest.param(*row.columns, id=row.id, marks=marks)
            for row, marks in zip(rows, lacking, strict=True)
        ],
    )


@pytest.fixture
def checked_attention(
    request: pytest.FixtureRequest,
    benchmark: BenchmarkFixture,
    mechanism: str,
    library: str,
    backend: str,
    device: str,
    work: str,
    sizes: str,
    dtype: str,
) -> Iterator[Callable[[], Arrays]]:
    """A call without arguments whose result is that of the oracle, for `benchmark` to time."""
    from precondattn_conformance.bench import benchmark_cases

    columns = (mechanism, library, backend, device, work, sizes, dtype)
    row = request.config.stash[ROWS][columns]
    with benchmark_cases.checked_attention(row, benchmark) as call:
        yield call


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: JsonObject) -> None:
    """Threads and versions of packages, for a run with rows of `benchmark_cases`."""
    if ROWS in config.stash:
        from precondattn_conformance.bench import machine

        machine_info["precondattn"] = machine.describe()
