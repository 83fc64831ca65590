"""PyTorch's selective checkpoints: which operations they store changes no gradient of a layer."""

from functools import partial

import pytest

pytest.importorskip("torch")

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from precondattn.execution.torch import operators
from precondattn.layers.torch import Block

PRODUCTS_AND_ATTENTION = [
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    operators.forward._opoverload,
]
POLICIES = {
    "all": lambda *_, **__: CheckpointPolicy.MUST_SAVE,
    "none": lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE,
    "products and attention": PRODUCTS_AND_ATTENTION,
}


def gradients(call, block, x, is_cast):
    with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
        out = call(block, x)
    return torch.autograd.grad((out * out.sin()).sum(), [x, *block.parameters()])


@pytest.mark.parametrize(
    "expression",
    [
        *("softmax", "lucid"),  # PyTorch's own attention, alone and after an operator.
        *(
            pytest.param(text, marks=pytest.mark.thorough)
            for text in ("gated_delta", "laser", "path", "mlstm", "ccq", "differential", "mesa")
        ),
    ],
)
@pytest.mark.parametrize("is_cast", [False, True])
def test_a_block_has_the_gradient_of_the_plain_call(expression, is_cast):
    torch.manual_seed(0)
    block, calls = Block(32, heads=2, mechanism=expression), []
    block.attention.register_forward_hook(lambda *_: calls.append(None))
    x = torch.randn(2, 20, 32, requires_grad=True)
    expected = gradients(lambda block, x: block(x), block, x, is_cast)
    bounds = {"rtol": 2e-2, "atol": 2e-2} if is_cast else {"rtol": 1e-4, "atol": 1e-5}
    for policy in POLICIES.values():
        calls.clear()
        contexts = partial(create_selective_checkpoint_contexts, policy)
        call = partial(checkpoint, use_reentrant=False, context_fn=contexts)
        found = gradients(call, block, x, is_cast)
        assert len(calls) <= 2  # The call, and its computation from what is stored.
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one / other.abs().max(), other / other.abs().max(), **bounds)
