"""JUnit XML for CI systems: a test for each case, with mechanisms as classes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from precondattn_conformance.report.record import RunRecord
from precondattn_conformance.report.result import Result, error_text
from precondattn_conformance.status import FAILED, PASSED, SKIPPED, UNSUPPORTED, XFAILED

SUITE = "precondattn-conformance"

TYPES = {
    UNSUPPORTED: "precondattn.unsupported",
    SKIPPED: "pytest.skip",
    XFAILED: "pytest.xfail",
}
"""The types of skipped tests, which are pytest's own where it has one."""


def write_junit(record: RunRecord, path: Path | str) -> None:
    """Write the outcomes of a record as JUnit XML."""
    counts = {
        "tests": str(len(record.outcomes)),
        "failures": str(record.count(FAILED)),
        "errors": "0",
        "skipped": str(sum(record.count(status) for status in TYPES)),
        "time": f"{sum(result.seconds for result in record.outcomes):.3f}",
    }
    root = Element("testsuites", {"name": SUITE, **counts})
    suite = SubElement(
        root, "testsuite", {"name": SUITE, **counts, "timestamp": record.date.partition("+")[0]}
    )
    _add_properties(suite, _of_the_run(record))
    for result in record.outcomes:
        _add_case(suite, result)
    tree = ElementTree.ElementTree(root)
    ElementTree.indent(tree, " ")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tree.write(path, encoding="utf-8", xml_declaration=True)


def _of_the_run(record: RunRecord) -> dict[str, str]:
    about = {
        "suite": record.suite,
        "backends": ", ".join(record.names) or "default",
        "level": record.level,
        "complete": str(record.complete).lower(),
    }
    about |= {f"compared of {r['check']}": f"{r['compared']} of {r['of']}" for r in record.checks}
    return about | {"device": record.device} if record.device else about


def _add_case(suite: Element, result: Result) -> None:
    # CI systems interpret a dot as the end of a package's name.
    classname = f"conformance.{result.mechanism.replace('.', '_')}"
    case = SubElement(
        suite,
        "testcase",
        {"classname": classname, "name": result.id, "time": f"{result.seconds:.4f}"},
    )
    measured = {"error": result.error, "bound": result.bound}
    properties = {name: f"{size:.6g}" for name, size in measured.items() if size is not None}
    _add_properties(case, properties)
    if result.status == PASSED:
        return
    if result.status == FAILED:
        outcome = SubElement(case, "failure", {"type": "disagreement"})
        parts = (result.reason, error_text(result), result.details, result.snippet)
        outcome.text = "\n\n".join(part.strip("\n") for part in parts if part)
    else:
        outcome = SubElement(case, "skipped", {"type": TYPES[result.status]})
        outcome.text = result.reason
    outcome.set("message", result.headline or result.status)


def _add_properties(parent: Element, properties: Mapping[str, str]) -> None:
    if not properties:
        return
    group = SubElement(parent, "properties")
    for name, value in properties.items():
        SubElement(group, "property", {"name": name, "value": value})
