"""Conformance cases grouped by mechanism: one test for each mechanism."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import pytest

from precondattn_conformance.case import Case
from precondattn_conformance.cases import makes_sense, of_named_layouts
from precondattn_conformance.checks import CHECKS
from precondattn_conformance.declared import derived, expressions
from precondattn_conformance.grid import FEWER_MASKED
from precondattn_conformance.runner import Report, run_case
from precondattn_conformance.status import FAILED, PASSED

OF_NUMBERS = (
    *("outputs", "gradients", "caching", "splits", "alternation", "cache_operations", "states"),
    *("packing", "padding", "future", "stability"),
)
"""Checks that compare numbers. What others find depends neither on keys nor on sizes."""


@dataclass(frozen=True)
class MechanismGroup:
    """The cases of one mechanism on one library, which are made when the test runs."""

    mechanism: str
    library: str
    make_cases: Callable[[], Iterator[Case]]
    where: str = ""
    """The backends that run the cases."""

    @property
    def cases(self):
        return list(self.make_cases())

    def fewer(self, is_left_out):
        """The group without some cases."""
        make = self.make_cases
        return replace(self, make_cases=lambda: (c for c in make() if not is_left_out(c)))

    @property
    def is_empty(self):
        """Whether there is no case; only the first one is made to see it."""
        return next(self.make_cases(), None) is None


def groups(level, library, dtypes, checks=(), without=()):
    """A group for each mechanism, of named layouts, except for those in `without`.

    A composition that no class declares only connects its steps: level smoke suffices. Rows of the
    design are large; `tests/conformance/test_design.py` runs some.
    """
    for expression in expressions():
        chosen = "smoke" if expression in derived() else level
        make = partial(of_named_layouts, chosen, expression, (library,), checks or CHECKS, dtypes)
        group = MechanismGroup(expression, library, make)
        yield from parameters(
            group.fewer(lambda case: case.layout in without) if without else group
        )


def parameters(group):
    """The group as the parameter of a test, unless it is empty."""
    if not group.is_empty:
        yield pytest.param(group, id=f"{group.library}-{group.mechanism}")


def mechanism_of(group):
    return group.values[0].mechanism


def slow_unless(is_default, groups):
    """The groups, with those marked slow whose mechanism is not `is_default`."""
    for group in groups:
        slow = () if is_default(mechanism_of(group)) else (pytest.mark.slow,)
        yield pytest.param(*group.values, id=group.id, marks=(*group.marks, *slow))


def thorough(groups):
    """The groups, marked thorough: they run in the second tier."""
    for group in groups:
        yield pytest.param(*group.values, id=group.id, marks=(*group.marks, pytest.mark.thorough))


def beyond(others, groups):
    """The groups without the cases that others have."""
    others = {group.id: group.values[0] for group in others}
    for group in groups:
        (made,) = group.values
        if group.id in others:
            made = made.fewer(others[group.id].cases.__contains__)
        if not made.is_empty:
            yield pytest.param(made, id=group.id, marks=group.marks)


def where(name, groups):
    """The groups with the name of the backends that run them."""
    for group in groups:
        (made,) = group.values
        yield pytest.param(replace(made, where=name), id=f"{name}-{group.id}", marks=group.marks)


def by_mechanism(groups):
    """The groups, those of one mechanism after each other: they share what the oracle computed."""
    return sorted(groups, key=mechanism_of)


def only(is_chosen, groups):
    """The groups whose mechanism `is_chosen`; others are left out."""
    return [group for group in groups if is_chosen(mechanism_of(group))]


def is_plain(expression):
    """Whether a mechanism is neither a composition nor has options."""
    return expression.isidentifier()


def is_declared_alone(expression):
    """Whether a mechanism is not a composition."""
    return "(" not in expression


def has_options_alone(expression):
    """Whether a mechanism has options and is not a composition."""
    return is_declared_alone(expression) and not is_plain(expression)


def groups_of(library, dtype, data):
    """A group for each mechanism that a class declares, of this data by check."""
    for expression in expressions():
        if expression not in derived():
            make = partial(cases_of_data, expression, library, dtype, data)
            yield from parameters(MechanismGroup(expression, library, make))


def cases_of_data(expression, library, dtype, data):
    for check, chosen in data.items():
        for layout, kind in chosen:
            case = Case(check, expression, library, dtype, layout, kind)
            if makes_sense(case):
                yield case


def fewer_queries(library, dtype, mechanisms):
    """A group for each mechanism: fewer queries than keys, and a mask of the keys."""
    data = {"gradients": ((FEWER_MASKED, "clustered"),)}
    return only(lambda mechanism: mechanism in mechanisms, groups_of(library, dtype, data))


def check(group, *backends, some=False):
    """No case fails; with `some`, one passes, and is not skipped."""
    report = Report([run_case(case, backends) for case in group.cases])
    failed = [f"{o.case.id}: {o.reason}" for o in report.outcomes if o.status == FAILED]
    assert not failed, "\n".join(failed)
    assert report.is_good
    assert not some or any(o.status == PASSED for o in report.outcomes)
