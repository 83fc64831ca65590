"""The pytest plugin: the suite as tests, for anyone's CI.

    pytest --pyargs precondattn_conformance --precondattn-backend NAME

Without one of its flags it does nothing, and it imports the standard library only until then:
every pytest run of an environment that has precondattn loads it.
"""

from __future__ import annotations

from typing import Any

FLAGS = {
    "backend": "hold this backend to the oracle (repeat for several, in order of preference)",
    "level": "how much to run: smoke (the default) or full",
    "device": "the device of the arrays, as the array library names it",
    "library": "only this array library (repeat for several)",
    "mechanism": "only this mechanism, an expression (repeat for several)",
    "check": "only this check: outputs, gradients or caching (repeat for several)",
    "dtype": "only this dtype (repeat for several)",
}
SINGLE = ("level", "device")
TEST = "::test_conformance["


def pytest_addoption(parser: Any) -> None:
    group = parser.getgroup("precondattn", "precondattn: conformance of attention backends")
    for name, text in FLAGS.items():
        action = {} if name in SINGLE else {"action": "append", "default": []}
        group.addoption(f"--precondattn-{name}", dest=f"precondattn_{name}", help=text, **action)


def _given(config: Any, name: str) -> Any:
    return config.getoption(f"precondattn_{name}")


def _is_active(config: Any) -> bool:
    return any(_given(config, name) for name in FLAGS)


def pytest_generate_tests(metafunc: Any) -> None:
    if "precondattn_case" not in metafunc.fixturenames:
        return
    config = metafunc.config
    if not _is_active(config):
        metafunc.parametrize("precondattn_case", [])
        return
    from precondattn_conformance.case import cases

    found = list(
        cases(
            _given(config, "level") or "smoke",
            only_libraries=tuple(_given(config, "library")),
            only_mechanisms=tuple(_given(config, "mechanism")),
            only_checks=tuple(_given(config, "check")),
            only_dtypes=tuple(_given(config, "dtype")),
        )
    )
    metafunc.parametrize("precondattn_case", found, ids=[case.id for case in found])


def pytest_terminal_summary(terminalreporter: Any, config: Any) -> None:
    if _given(config, "backend"):
        names = ", ".join(_given(config, "backend"))
        terminalreporter.write_line(f"{names}: {_compared(terminalreporter)} cases compared")


def pytest_sessionfinish(session: Any) -> None:
    """A named backend of which nothing was compared has failed, whatever the tests say."""
    config = session.config
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if hasattr(config, "workerinput") or reporter is None or not _given(config, "backend"):
        return
    if not config.option.collectonly and not _compared(reporter):
        session.exitstatus = 1


def _compared(reporter: Any) -> int:
    reports = reporter.stats.get("passed", []) + reporter.stats.get("failed", [])
    return sum(TEST in report.nodeid for report in reports)
