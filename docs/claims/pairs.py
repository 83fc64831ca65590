"""Pairs of a key and a value between tokens of noise, and small decoders trained to recall them.

Pairs stand at random places, and the keys of all of them follow, in the same order, each of which
asks for its value. A decoder has one block of width 64 with one head. Its layer is as published,
but for short convolutions of q and k where they are plain projections.
"""

from claims.needles import layer
from claims.trainings import cross_entropy, fit

KEYS, VALUES, NOISE = 64, 64, 16
LENGTH, PAIRS = 32, 4
"""The sequence length and the number of pairs in training."""


def batch(count, length, pairs):
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


def decoder(name):
    """An untrained decoder."""
    from precondattn.layers.torch import Decoder

    layers = [layer(name, plain_values=False)]
    return Decoder(KEYS + VALUES + NOISE, 64, heads=1, layers=layers)


def learn(model, updates, size):
    """Train a decoder; its last loss."""

    def loss_of():
        tokens, values, _ = batch(size, LENGTH, PAIRS)
        return cross_entropy(model(tokens)[:, -PAIRS:], values)

    return round(fit(model, 3e-3, updates, loss_of)[-1], 4)


def recall(model, length, pairs):
    """The share of pairs whose value is found, in 64 sequences."""
    import torch

    torch.manual_seed(length)
    with torch.no_grad():
        tokens, values, _ = batch(64, length, pairs)
        found = model(tokens)[:, -pairs:].argmax(-1)
    return round((found == values).float().mean().item(), 4)
