"""Conformance cases grouped by mechanism: one test for each mechanism."""

import pytest

from precondattn_conformance.case import Case
from precondattn_conformance.cases import cases, makes_sense
from precondattn_conformance.declared import derived, expressions
from precondattn_conformance.grid import FEWER_MASKED
from precondattn_conformance.runner import run_cases
from precondattn_conformance.status import FAILED


def groups(level, library, dtypes, checks=()):
    """A group for each mechanism, of named layouts.

    A composition that no class declares only connects its steps: level smoke suffices. Rows of the
    design are large; `tests/conformance/test_design.py` runs some.
    """
    for expression in expressions():
        options = {"only_libraries": (library,), "only_dtypes": dtypes, "only_checks": checks}
        chosen = "smoke" if expression in derived() else level
        every = cases(chosen, only_mechanisms=(expression,), **options)
        result = [case for case in every if not case.layout.block]
        if result:
            yield pytest.param(result, id=f"{library}-{expression}")


def mechanism_of(group):
    return group.values[0][0].mechanism


def slow_unless(is_default, groups):
    """The groups; those whose mechanism is not `is_default` are marked slow."""
    for group in groups:
        slow = () if is_default(mechanism_of(group)) else (pytest.mark.slow,)
        yield pytest.param(*group.values, id=group.id, marks=(*group.marks, *slow))


def only(is_chosen, groups):
    """The groups whose mechanism `is_chosen`; others are left out."""
    return [group for group in groups if is_chosen(mechanism_of(group))]


def is_plain(expression):
    """Neither a composition nor a mechanism with options."""
    return expression.isidentifier()


def is_never(expression):
    """For groups that are all slow."""
    return False


def is_declared_alone(expression):
    """No composition."""
    return "(" not in expression


def has_options_alone(expression):
    """Options, and no composition."""
    return is_declared_alone(expression) and not is_plain(expression)


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
        result = [case for case in made if makes_sense(case)]
        if result:
            yield pytest.param(result, id=f"{library}-{expression}")


def fewer_queries(library, dtype, mechanisms):
    """A group for each mechanism: fewer queries than keys, and a mask of the keys."""
    data = {"gradients": ((FEWER_MASKED, "clustered"),)}
    for group in groups_of(library, dtype, data):
        if group.id.removeprefix(f"{library}-") in mechanisms:
            yield group


def check(group, backend):
    report = run_cases(group, (backend,))
    failed = [f"{o.case.id}: {o.reason}" for o in report.outcomes if o.status == FAILED]
    assert not failed, "\n".join(failed)
    assert report.is_good
