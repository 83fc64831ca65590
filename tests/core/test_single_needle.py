"""RULER's tasks of a single needle, as token sequences (docs/claims/single_needle.py)."""

from uuid import UUID

import numpy as np
import pytest
from claims.single_needle import TASKS, WORDS, Sample, accuracy, sample


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
        hay_behind, what, question = rest[len(value) + 2 :].partition(" what is the special")
        assert f"for {key} mentioned" in question
        assert question.endswith(f"{key} mentioned in the provided text is {value}")
        assert needle
        assert what
        assert "special" not in hay + hay_behind + key
        assert len(tokens) == 200


def test_values_are_numbers_of_seven_digits_and_uuids_of_version_4():
    for task in ("passkey", "number"):
        numbers = [int(text(row).replace(" ", "")) for row in drawn(task).answers]
        assert min(numbers) >= 10**6
        assert len(set(numbers)) == 100
    uuids = {UUID(text(row).replace(" ", "")) for row in drawn("uuid").answers}
    assert len(uuids) == 100
    assert all(of.version == 4 for of in uuids)


@pytest.mark.parametrize("task", TASKS)
def test_depth_puts_the_needle_between_sentences_from_the_first_to_the_last(task):
    first, last = (drawn(task, depth=depth) for depth in (0, 1))
    assert all(text(row).startswith("one of the special") for row in first.tokens)
    behind = [row[at + len(of) :] for row, of, at in zip(*last, strict=True)]
    assert all(text(row).startswith(". what is the special magic") for row in behind)
    for row, place in zip(drawn(task).tokens, drawn(task).places, strict=True):
        before = text(row[:place]).partition("one of the special")[0].strip()
        assert not before or before.endswith(".")
    assert len(set(drawn(task).places.tolist())) > 3


def test_accuracy_counts_sequences_of_which_every_character_is_right():
    torch = pytest.importorskip("torch")
    right = drawn("number")
    answers = right.answers.copy()
    answers[:25, 3] += 1

    def model(tokens):
        following = torch.roll(tokens, -1, 1)
        return torch.nn.functional.one_hot(following, len(WORDS)).float()

    assert accuracy(model, right) == 1
    assert accuracy(model, Sample(right.tokens, answers, right.places)) == 0.75


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("niah", 1, 200), "task must be one of passkey, number, uuid, not 'niah'"),
        (("uuid", 1, 50), "length must be at least 112 for the task uuid, not 50"),
        (("uuid", 1, 200, 1.5), "depth must be from 0 to 1, not 1.5"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    task, count, length, *depth = arguments
    with pytest.raises(ValueError, match=message):
        sample(task, count, length, np.random.default_rng(0), depth=depth[0] if depth else None)
