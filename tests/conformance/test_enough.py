"""The share of each check that was compared, declared parts, and cases that count in neither."""

import pytest

from precondattn_conformance.cases import case_of
from precondattn_conformance.declines import declared
from precondattn_conformance.enough import shares, too_little
from precondattn_conformance.runner import Outcome, run_case
from precondattn_conformance.session import Session


def outcomes(check, passed=0, unsupported=0, *, mechanism="softmax", skipped=0, **more):
    case = case_of(f"{check}-numpy-float32-plain-clustered-{mechanism}")
    counts = {"passed": passed, "unsupported": unsupported, "skipped": skipped}
    reason = "not today"
    return [Outcome(case, s, reason=reason, **more) for s, n in counts.items() for _ in range(n)]


def share(found, *texts):
    (only,) = shares(found, declared(texts))
    return only.compared, only.expected, only.total


def test_half_of_a_check_is_enough_and_less_is_not():
    """Skipped cases, and mechanisms of which nothing was compared, are not counted."""
    others = outcomes("outputs", 0, 9, mechanism="lucid")
    assert share([*outcomes("outputs", 1, 1, skipped=9), *others]) == (1, 2, 2)
    half = [*outcomes("outputs", 9), *outcomes("splits", 2, 2)]
    assert not too_little(shares(half, {}))
    said = "\n".join(too_little(shares([*half, *outcomes("splits", 0, 1)], {})))
    assert "less than half: splits 2 of 5\n" in said
    assert "not today (3)" in said


@pytest.mark.parametrize(
    ("text", "applies"),
    [
        ("states: w", True),
        ("numpy: w", True),
        ("grouped_heads: w", True),
        ("vjp: w", True),
        ("extend_vjp: w", True),
        ("kda: w", True),
        ("states float32 kda: w", True),
        ("caching: w", False),
        ("extend gdn2: w", False),
        ("states float64: w", False),
    ],
)
def test_the_words_of_a_part_all_apply_to_its_cases(text, applies):
    found = outcomes("states", 1, 3, mechanism="kda", verb="extend_vjp")
    assert share(found, text) == (1, 1 if applies else 4, 4)


def test_a_step_that_has_no_gradient_is_not_declared_by_other_verbs():
    found = outcomes("states", 1, 3, mechanism="kda", verb="extend")
    assert share(found, "extend_vjp: w", "vjp: w") == (1, 4, 4)


@pytest.mark.parametrize(
    ("texts", "error", "says"),
    [
        (("float64",), ValueError, "\"PART: WHY\" expected, .* found 'float64'"),
        (("float64: ",), ValueError, '"PART: WHY" expected'),
        ((": why",), ValueError, '"PART: WHY" expected'),
        (("gqa: why",), ValueError, "the suite has no part 'gqa'; there are outputs, "),
        (("float64 softmacks: why",), ValueError, "no part 'softmacks'"),
        ("float64: why", TypeError, r"\('float64: why',\); found one"),
    ],
)
def test_a_declaration_that_says_nothing_is_refused(texts, error, says):
    with pytest.raises(error, match=says):
        declared(texts)


def test_a_declaration_is_of_a_named_backend_and_read_before_any_case_runs():
    with pytest.raises(ValueError, match="--declines 'float64: why' needs a backend"):
        Session(declines=("float64: why",)).cases()
    with pytest.raises(ValueError, match="no part 'gqa'"):
        Session(backend=("reference",), declines=("gqa: why",)).cases()


def test_a_check_that_can_not_run_here_is_skipped_and_not_declined():
    outcome = run_case(case_of("memory-numpy-float32-long-random-softmax"), "reference")
    assert outcome.status == "skipped"
    assert outcome.reason == "reference declares no memory class"
