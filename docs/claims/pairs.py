"""Pairs of a key and a value between tokens of noise, and small decoders trained to recall them.

Pairs stand at random places, and the keys of all of them follow, in the same order, each of which
asks for its value. A decoder has one block of width 64 with one head. Its layer is as published,
but for short convolutions of q and k where they are plain projections.
"""

from __future__ import annotations

from typing import Any

from claims.needles import layer
from claims.trainings import fit

KEYS, VALUES, NOISE = 64, 64, 16
LENGTH, PAIRS = 32, 4
"""The sequence length and the number of pairs in training."""
RATE = 3e-3


def batch(count: int, length: int, pairs: int) -> tuple[Any, Any, Any]:
    """Tokens (count, length), and the values of all pairs and where they are (count, pairs)."""
    import torch

    first = length - pairs
    tokens = KEYS + VALUES + torch.randint(NOISE, (count, length))
    keys = torch.rand(count, KEYS).argsort(1)[:, :pairs]
    values = KEYS + torch.randint(VALUES, (count, pairs))
    places = 2 * torch.rand(count, first // 2).argsort(1)[:, :pairs]
    tokens.scatter_(1, places, keys)
    tokens.scatter_(1, places + 1, values)
    tokens[:, first:] = keys
    return tokens, values, places + 1


def decoder(name: str, seed: int) -> Any:
    """An untrained decoder."""
    import torch

    from precondattn.layers.torch import Decoder

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    layers = [layer(name, plain_values=False)]
    return Decoder(KEYS + VALUES + NOISE, 64, heads=1, layers=layers)


def model_of(name: str, seed: int, updates: int, size: int, shown: bool) -> tuple[Any, float]:
    """A trained decoder, and its last loss."""
    import torch

    model = decoder(name, seed)

    def loss_of() -> Any:
        tokens, values, _ = batch(size, LENGTH, PAIRS)
        logits = model(tokens)[:, -PAIRS:]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), values.flatten())

    return model, round(fit(model, RATE, updates, loss_of, shown=shown)[-1], 4)


def recall(model: Any, length: int, pairs: int) -> float:
    """The share of pairs whose value is found, in 64 sequences."""
    import torch

    torch.manual_seed(length)
    with torch.no_grad():
        tokens, values, _ = batch(64, length, pairs)
        found = model(tokens)[:, -pairs:].argmax(-1)
    return round((found == values).float().mean().item(), 4)
