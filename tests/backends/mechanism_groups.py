"""Conformance cases of each mechanism together: one test says what it proves of one mechanism."""

import pytest

from precondattn_conformance.case import Case
from precondattn_conformance.cases import cases, makes_sense
from precondattn_conformance.declared import derived, expressions
from precondattn_conformance.grid import FEWER_MASKED
from precondattn_conformance.runner import run_cases
from precondattn_conformance.status import FAILED


def groups(level, library, dtypes, checks=()):
    """A group for each mechanism.

    Of a composition that no class declares, it is the wiring of its steps: that is smoke's.
    """
    for expression in expressions():
        options = {"only_libraries": (library,), "only_dtypes": dtypes, "only_checks": checks}
        chosen = "smoke" if expression in derived() else level
        found = [*cases(chosen, only_mechanisms=(expression,), **options)]
        if found:
            yield pytest.param(found, id=f"{library}-{expression}")


def groups_of(library, dtype, data):
    """A group for each mechanism that a class declares, of this data by check."""
    for expression in expressions():
        if expression in derived():
            continue
        made = [
            Case(check, expression, library, dtype, layout, kind)
            for check, chosen in data.items()
            for layout, kind in chosen
        ]
        found = [case for case in made if makes_sense(case)]
        if found:
            yield pytest.param(found, id=f"{library}-{expression}")


def fewer_queries(library, dtype, mechanisms):
    """A group for each: of fewer queries than keys, a mask of which hides some."""
    data = {"gradients": ((FEWER_MASKED, "clustered"),)}
    for group in groups_of(library, dtype, data):
        if group.id.removeprefix(f"{library}-") in mechanisms:
            yield group


def check(group, backend):
    report = run_cases(group, (backend,))
    failed = [f"{o.case.id}: {o.reason}" for o in report.outcomes if o.status == FAILED]
    assert not failed, "\n".join(failed)
    assert report.is_good
