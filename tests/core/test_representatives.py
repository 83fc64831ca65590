"""The mechanisms that stand for all others in tests of the core."""

import precondattn as pa
from precondattn.algebra import registry
from precondattn_conformance.declared import expressions
from tests.representatives import REPRESENTATIVES


def kinds_in(expression):
    """The classes of a mechanism, of its bases and of the leaves that it calls, and the
    recurrences of the leaves."""
    mechanism = pa.parse(expression)
    found = {type(leaf) for leaf in mechanism.program.leaves} | {type(mechanism)}
    found |= {leaf.recurrence for leaf in mechanism.program.leaves}
    while hasattr(mechanism, "base"):
        mechanism = mechanism.base
        found.add(type(mechanism))
    return found - {None}


def test_every_class_of_the_library_or_its_recurrence_is_in_a_representative():
    ours = {
        cls
        for cls in registry.registered().values()
        if cls.__module__.startswith("precondattn.")  # Other tests register classes too.
    }
    known = set().union(*map(kinds_in, REPRESENTATIVES))
    missing = {cls for cls in ours if cls not in known and cls().recurrence not in known}
    assert not missing, f"tests/representatives.py lacks {sorted(cls.name for cls in missing)}"


def test_representatives_are_declared_and_written_once():
    assert set(REPRESENTATIVES) <= set(expressions())
    assert len(set(REPRESENTATIVES)) == len(REPRESENTATIVES)
