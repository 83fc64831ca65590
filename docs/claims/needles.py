"""Needles of two-token keys in a haystack, and small decoders trained to recall them.

A needle is a key of two tokens out of 16 each, and a value out of 64, so that a key shares a token
with others. Needles stand at random places of a sequence of noise, and the keys of all of them
follow, in the same order, each of which asks for its value:

    noise  a b v  noise  a d w  noise …   a b → v   a d → w

A decoder has one block. Queries and keys have short convolutions in every model, so that a token
knows those before it; values have none, so that a needle's value is read at one token.
"""

from dataclasses import replace

import precondattn as pa
from claims.trainings import cross_entropy, fit

PARTS, VALUES, NOISE = 16, 64, 16
"""Tokens of each kind: parts of keys, values, and noise."""
TOKENS = PARTS + VALUES + NOISE
LENGTH, NEEDLES = 128, 16
"""The sequence length and the number of needles in training."""
TESTS = ((128, 16), (256, 32), (512, 64), (1024, 128), (1024, 16))
"""The lengths and numbers of needles in tests."""


def batch(count, length, needles):
    """Tokens (count, length), and the values of all needles and where they are (count, needles)."""
    import torch

    first = length - 2 * needles
    tokens = PARTS + VALUES + torch.randint(NOISE, (count, length))
    keys = torch.rand(count, PARTS * PARTS).argsort(1)[:, :needles]
    values = PARTS + torch.randint(VALUES, (count, needles))
    places = 3 * torch.rand(count, first // 3).argsort(1)[:, :needles]
    a, b = keys // PARTS, keys % PARTS
    for i, token in enumerate((a, b, values)):
        tokens.scatter_(1, places + i, token)
    tokens[:, first::2], tokens[:, first + 1 :: 2] = a, b
    return tokens, values, places + 2


def layer(mechanism, *, plain_values=True):
    """The arguments of a layer: its published recipes, but for q and k, and v if `plain_values`."""
    from precondattn.layers.recipes.projections import Convolution, Projection, Rotary
    from precondattn.layers.torch import Attention

    recipes = {}
    for entry in Attention(8, heads=1, mechanism=mechanism).plan.entries:
        if entry.name in ("q", "k") and isinstance(entry.recipe, (Projection, Rotary)):
            recipes[entry.name] = Convolution()
        if plain_values and entry.name == "v" and isinstance(entry.recipe, Convolution):
            recipes["v"] = Projection()
    return {"mechanism": mechanism, "recipes": recipes}


def train(seed, arguments, updates, size, *, width):
    """A trained decoder of four heads, and the losses of its steps."""
    import torch

    from precondattn.layers.torch import Decoder

    torch.manual_seed(seed)  # The layer's arguments were found with random weights.
    model = Decoder(TOKENS, width, heads=4, layers=[arguments])

    def loss_of():
        tokens, values, _ = batch(size, LENGTH, NEEDLES)
        return cross_entropy(model(tokens)[:, 1 - 2 * NEEDLES :: 2], values)

    return model, [round(loss, 4) for loss in fit(model, 3e-3, updates, loss_of)]


def accuracy(model, length, needles, count=32):
    """The share of needles that are recalled, in `count` sequences."""
    import torch

    torch.manual_seed(length + needles)
    with torch.no_grad():
        tokens, values, _ = batch(count, length, needles)
        found = model(tokens)[:, 1 - 2 * needles :: 2].argmax(-1)
    return round((found == values).float().mean().item(), 4)


def inputs_of(model, tokens):
    """The inputs of the mechanism of the first block."""
    import torch

    attention, seen = model.blocks[0].attention, {}
    plan = attention.plan

    def keeping(**inputs):
        seen.update(inputs)
        return plan.mechanism(**inputs)

    attention.plan = replace(plan, mechanism=keeping)
    with torch.no_grad():
        model(tokens)
    attention.plan = plan
    return seen


def shares(model, length=LENGTH, count=16):
    """The shares of the absolute weights of the queries, by place, for 16 needles.

    The weights of a mechanism that is linear in its values may be negative. Shares are those of the
    head with the largest share on the answer.
    """
    import torch

    torch.manual_seed(length)
    tokens, _, answers = batch(count, length, NEEDLES)
    inputs = inputs_of(model, tokens)
    with torch.no_grad():
        mechanism = model.blocks[0].attention.mechanism
        weights = pa.diagnostics.weights(mechanism, **inputs).abs()[:, :, 1 - 2 * NEEDLES :: 2]
    weights = weights.movedim(1, 0) / weights.movedim(1, 0).sum(-1, keepdim=True)
    answer = weights.gather(3, answers[..., None].expand(*weights.shape[:3], 1))[..., 0]
    noise = torch.where(tokens[:, None] >= PARTS + VALUES, weights, 0).sum(-1)
    head = int(answer.mean((1, 2)).argmax())
    found = {"answer": answer[head].mean().item(), "noise": noise[head].mean().item()}
    found["needles"] = 1 - found["answer"] - found["noise"]
    return {name: round(share, 4) for name, share in found.items()}
