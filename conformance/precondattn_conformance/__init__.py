"""The conformance suite, which compares any backend, third-party ones included, with the oracle.

    precondattn conformance --backend NAME --level smoke
    pytest --pyargs precondattn_conformance --precondattn-backend NAME
    check(function, "kda")

All run the same cases (`cases.py`), which are generated from the mechanisms' declarations.
`benchmark_cases` gives a test of pytest-benchmark calls to time.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from precondattn_conformance.bench.benchmark_cases import benchmark_cases
    from precondattn_conformance.check_function import CheckResult, check
    from precondattn_conformance.functions.backend import backend_from_function
    from precondattn_conformance.of_case import cache_of, call_of, expected_of, replay

__all__ = [
    "CheckResult",
    "backend_from_function",
    "benchmark_cases",
    "cache_of",
    "call_of",
    "check",
    "expected_of",
    "replay",
]

# Every pytest run imports this package for its plugin, so a name's module is imported with it.
MODULES = {
    "CheckResult": "check_function",
    "backend_from_function": "functions.backend",
    "benchmark_cases": "bench.benchmark_cases",
    "check": "check_function",
    **dict.fromkeys(("cache_of", "call_of", "expected_of", "replay"), "of_case"),
}


def __getattr__(name: str) -> object:
    if name in MODULES:
        return getattr(import_module(f"{__name__}.{MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
