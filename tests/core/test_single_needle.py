"""RULER's tasks of a single needle, as token sequences (docs/claims/single_needle.py)."""

from uuid import UUID

import numpy as np
import pytest
from claims.single_needle import TASKS, WORDS, sample


def text(tokens):
    return " ".join(WORDS[i] for i in tokens)


def drawn(task, **options):
    return sample(task, 100, 200, np.random.default_rng(0), **options)


@pytest.mark.parametrize("task", TASKS)
def test_the_question_asks_for_the_key_of_the_only_needle_and_its_value_ends_the_sequence(task):
    kind = "uuid" if task == "uuid" else "number"
    for tokens, answer, place in zip(*drawn(task), strict=True):
        value = text(answer)
        hay, needle, rest = text(tokens).partition(f"one of the special magic {kind}s for ")
        key, _, rest = rest.partition(" is : ")
        assert text(tokens[place : place + len(answer)]) == value == rest[: len(value)]
        hay_behind, _, question = rest[len(value) + 2 :].partition(" what is the special")
        assert f"for {key} mentioned" in question
        assert question.endswith(f"{key} mentioned in the provided text is {value}")
        assert needle
        assert "special" not in hay + hay_behind + key
        assert len(tokens) == 200
        number = value.replace(" ", "")
        assert UUID(number).version == 4 if task == "uuid" else int(number) >= 10**6
    first, last = (drawn(task, depth=depth) for depth in (0, 1))
    assert all(text(row).startswith("one of the special") for row in first.tokens)
    behind = [row[at + len(of) :] for row, of, at in zip(*last, strict=True)]
    assert all(text(row).startswith(". what is the special magic") for row in behind)


@pytest.mark.parametrize(
    ("arguments", "depth", "message"),
    [
        (("niah", 1, 200), None, "task must be one of passkey, number, uuid, not 'niah'"),
        (("uuid", 1, 50), None, "length must be at least 112 for the task uuid, not 50"),
        (("uuid", 1, 200), 1.5, "depth must be from 0 to 1, not 1.5"),
    ],
)
def test_bad_arguments_are_named(arguments, depth, message):
    with pytest.raises(ValueError, match=message):
        sample(*arguments, np.random.default_rng(0), depth=depth)
