"""scikit-learn's 8 × 8 digits, and a vision transformer of four blocks that learns them.

1,297 images are learned in batches of 64 with AdamW and one cycle of rates, 500 are held out.
"""

from functools import cache

import numpy as np

HEADS = 8
TRAINING, ALL, BATCH, WEIGHT_DECAY = 1297, 1797, 64, 0.05


class Data:
    """Images (n, 1, 8, 8) and classes (n) as tensors, for training and held out."""

    def __init__(self, images, classes):
        import torch

        count = len(images) * TRAINING // ALL
        x, y = torch.tensor(images, dtype=torch.float32), torch.tensor(classes)
        self.images, self.classes = x[:count], y[:count]
        self.held_out, self.held_out_classes = x[count:], y[count:]

    def accuracy(self, model):
        """The share of held-out images that are classified correctly, in the model's dtype."""
        import torch

        with torch.no_grad():
            found = model(self.held_out.to(model.pos_embed.dtype)).argmax(1)
        return round((found == self.held_out_classes).double().mean().item(), 4)


@cache
def load(made_up=None):
    """The digits, images between −1 and 1 in random order, or as many `made_up` ones."""
    if made_up is not None:
        rng = np.random.default_rng(0)
        return Data(rng.normal(size=(made_up, 1, 8, 8)), rng.integers(0, 10, made_up))
    from sklearn.datasets import load_digits  # The extra `claims` has it.

    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    return Data(found.images[order, None] / 8 - 1, found.target[order])


def reader(mechanism, seed, **options):
    """An untrained model."""
    import torch

    from precondattn.layers.torch import VisionTransformer

    torch.manual_seed(seed)
    options |= {"heads": HEADS, "blocks": 4, "classes": 10, "channels": 1, "mechanism": mechanism}
    return VisionTransformer(8, 2, 64, **options)


def learn(model, data, epochs, rate, check):
    """The mean loss of each epoch; `check` is called before the first one and after each."""
    import torch

    count = len(data.images)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rate, total_steps=epochs * -(-count // BATCH), pct_start=0.1
    )
    losses = []
    check(0)
    for epoch in range(1, epochs + 1):
        total = 0.0
        for batch in torch.randperm(count).split(BATCH):
            logits = model(data.images[batch])
            loss = torch.nn.functional.cross_entropy(logits, data.classes[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item() * len(batch)
        losses.append(float(f"{total / count:.4g}"))
        check(epoch)
    return losses


def inputs_of_blocks(model, images):
    """The input of each block's attention."""
    import torch

    found = []
    hooks = [
        block.attn.register_forward_pre_hook(lambda _, given: found.append(given[0]))
        for block in model.blocks
    ]
    with torch.no_grad():
        model(images)
    for hook in hooks:
        hook.remove()
    return found


def rows_of(model, images):
    """q, k and v (b, t, h, ·) of each block."""
    import torch

    with torch.no_grad():
        return [
            tuple(f(x).unflatten(-1, (HEADS, -1)) for f in (attn.q_proj, attn.k_proj, attn.v_proj))
            for attn, x in zip(
                (block.attn for block in model.blocks), inputs_of_blocks(model, images), strict=True
            )
        ]
