"""A pytest plugin that writes the seconds of each test as JSON to the file named by `TIMES`.

`python -m pytest -p times_of_tests`; with xdist the main process has the times of all workers.
"""

from __future__ import annotations

import json
import os
from typing import Any

seconds: dict[str, float] = {}
outcomes: dict[str, str] = {}


def pytest_runtest_logreport(report: Any) -> None:
    seconds[report.nodeid] = seconds.get(report.nodeid, 0.0) + report.duration
    if report.when == "call" or report.outcome != "passed":
        outcomes[report.nodeid] = report.outcome


def pytest_sessionfinish(session: Any) -> None:
    if "TIMES" in os.environ and not hasattr(session.config, "workerinput"):
        with open(os.environ["TIMES"], "w", encoding="utf-8") as file:
            json.dump({"seconds": seconds, "outcomes": outcomes}, file, indent=0)
