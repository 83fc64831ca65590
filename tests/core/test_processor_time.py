"""The budget of processor time: what is within it, what is not, and which files grew."""

import pytest

from tests.processor_time import LOOP, compare

BEFORE = {LOOP: 0.03, "tests/a.py": 10.0, "tests/b.py": 30.0}


@pytest.mark.parametrize(
    ("run", "is_within", "grown"),
    [
        (BEFORE, True, []),
        ({LOOP: 0.03, "tests/a.py": 13.0, "tests/b.py": 30.0}, True, ["tests/a.py"]),
        ({LOOP: 0.02, "tests/a.py": 10.0, "tests/b.py": 30.0}, False, ["tests/b.py", "tests/a.py"]),
        (BEFORE | {"tests/new.py": 9.0}, False, ["tests/new.py"]),
    ],
)
def test_a_run_beside_the_budget(run, is_within, grown):
    comparison = compare(run, BEFORE)
    assert (comparison.is_within, [file for file, *_ in comparison.grown]) == (is_within, grown)
    assert all(file in str(comparison) for file in grown) or is_within
