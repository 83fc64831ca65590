"""The pytest plugin: the suite as tests, for anyone's CI.

    pytest --pyargs precondattn_conformance --precondattn-backend NAME

Its flags are those of `precondattn conformance`. Without any of them it does nothing, and imports
the standard library only, because every pytest run in an environment with precondattn loads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

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


def _given(config: pytest.Config, name: str) -> Flag:
    return config.getoption(f"precondattn_{name}")


def _is_active(config: pytest.Config) -> bool:
    return any(_given(config, name) for name in (*MANY, *ONE))


def pytest_configure(config: pytest.Config) -> None:
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
