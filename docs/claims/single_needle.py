"""One needle in a haystack: RULER's three tasks S-NIAH, as sequences of tokens.

A sentence with a key and a value stands between others; a question and the value end the sequence:

    noise …  one of the special magic numbers for k l is : 4 7 1 0 9 3 2 .  noise …
    what is the special magic number for k l mentioned …  is  4 7 1 0 9 3 2

    passkey    five short sentences over and over; a number of seven digits        niah_single_1
    number     an essay; a number of seven digits                                  niah_single_2
    uuid       an essay; a UUID of 36 characters                                   niah_single_3

A key is one of 64 adjectives and one of 64 nouns. Values are written character by character. Words
of adjectives, nouns and essays have no meaning, so that nothing is downloaded: an essay is made of
sentences of 4 to 16 words, of which the n-th is as frequent as 1/n. RULER's instruction before the
haystack is left out, and the first sentence is cut so that all sequences are of one length.

Source: RULER (arXiv 2404.06654); NVIDIA/RULER, scripts/synthetic.yaml and data/synthetic/niah.py.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args
from uuid import UUID

import numpy as np

Task = Literal["passkey", "number", "uuid"]
TASKS: tuple[Task, ...] = get_args(Task)
KEYS, ESSAY = 64, 512
"""Adjectives, as many nouns, and words of essays."""
PASSAGE = (
    "the grass is green . the sky is blue . the sun is yellow . here we go . there and back again ."
)
NEEDLE = "one of the special magic {kind}s for {key} is : {value} ."
QUESTION = (
    "what is the special magic {kind} for {key} mentioned in the provided text ? "
    "the special magic {kind} for {key} mentioned in the provided text is {value}"
)
_TEXT = f"{PASSAGE} {NEEDLE} {QUESTION}".format(kind="number", key="", value="").split()
WORDS = (
    *sorted({*_TEXT, "uuid", "uuids"}),
    *"0123456789abcdef-",
    *(f"adjective{i}" for i in range(KEYS)),
    *(f"noun{i}" for i in range(KEYS)),
    *(f"word{i}" for i in range(ESSAY)),
)
"""The vocabulary: token i is the word `WORDS[i]`."""
_NUMBER = {word: i for i, word in enumerate(WORDS)}


class Sample(NamedTuple):
    """Sequences of one task."""

    tokens: np.ndarray
    """(count, length), the last of which are the answer."""
    answers: np.ndarray
    """(count, characters)."""
    places: np.ndarray
    """(count,): where the needle's value begins."""


def sample(
    task: Task, count: int, length: int, rng: np.random.Generator, *, depth: float | None = None
) -> Sample:
    """`count` sequences of `length` tokens, with the needle between two sentences of the haystack.

    `depth` is the share of sentences before it, from 0 to 1; by default it stands at random.

    Raises
    ------
    ValueError
        If the task is unknown, `depth` is not in [0, 1], or the needle and its question do not fit
        into `length` tokens.

    Examples
    --------
    >>> import numpy as np
    >>> from claims.single_needle import WORDS, sample
    >>> tokens, answers, places = sample("number", 2, 128, np.random.default_rng(0))
    >>> tokens.shape, answers.shape, places.shape
    ((2, 128), (2, 7), (2,))
    >>> "".join(WORDS[i] for i in answers[0])
    '5600228'
    >>> bool((tokens[0, places[0] : places[0] + 7] == answers[0]).all())
    True
    """
    if task not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, not {task!r}")
    if depth is not None and not 0 <= depth <= 1:
        raise ValueError(f"depth must be from 0 to 1, not {depth}")
    rows = [_one(task, length, rng, depth) for _ in range(count)]
    return Sample(*(np.array(part) for part in zip(*rows, strict=True)))


def accuracy(model: Any, drawn: Sample) -> float:
    """The share of sequences whose whole answer greedy decoding writes, for a model of PyTorch.

    It does so if each character is the likeliest one behind those before it, which one call shows.
    """
    import torch

    characters = drawn.answers.shape[1]
    with torch.no_grad():
        logits = model(torch.from_numpy(drawn.tokens))[:, -characters - 1 : -1]
    return float((logits.argmax(-1).numpy() == drawn.answers).all(1).mean())


def _one(
    task: Task, length: int, rng: np.random.Generator, depth: float | None
) -> tuple[list[int], list[int], int]:
    key = f"adjective{rng.integers(KEYS)} noun{rng.integers(KEYS)}"
    value, kind = _value(task, rng), "uuid" if task == "uuid" else "number"
    needle, question = (
        _tokens(text.format(kind=kind, key=key, value=" ".join(value)))
        for text in (NEEDLE, QUESTION)
    )
    space = length - len(needle) - len(question)
    if space < 0:
        least = len(needle) + len(question)
        raise ValueError(f"length must be at least {least} for the task {task}, not {length}")
    hay, ends = _haystack(task, space, rng)
    at = ends[rng.integers(len(ends)) if depth is None else round(depth * (len(ends) - 1))]
    tokens = [*hay[:at], *needle, *hay[at:], *question]
    return tokens, _tokens(" ".join(value)), at + len(needle) - 1 - len(value)


def _value(task: Task, rng: np.random.Generator) -> str:
    if task == "uuid":
        return str(UUID(bytes=rng.bytes(16), version=4))
    return str(rng.integers(10**6, 10**7))


def _haystack(task: Task, length: int, rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """Tokens, and where a needle may stand: before, between and behind sentences."""
    hay: list[int] = []
    ends = []
    while len(hay) < length:
        hay += _tokens(PASSAGE) if task == "passkey" else _sentence(rng)
        ends.append(len(hay))
    cut = len(hay) - length
    return hay[cut:], [0, *(end - cut for end in ends if end > cut)]


def _sentence(rng: np.random.Generator) -> list[int]:
    share = 1 / np.arange(1, ESSAY + 1)
    words = rng.choice(ESSAY, rng.integers(4, 17), p=share / share.sum())
    return [*(_NUMBER["word0"] + words).tolist(), _NUMBER["."]]


def _tokens(text: str) -> list[int]:
    return [_NUMBER[word] for word in text.split()]
