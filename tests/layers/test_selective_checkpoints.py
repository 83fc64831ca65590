"""PyTorch's selective checkpoints: which operations they store changes no gradient of a layer."""

from functools import partial

import pytest

pytest.importorskip("torch")

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts as contexts

from precondattn.execution.torch import operators
from precondattn.layers.torch import Block

PRODUCTS_AND_ATTENTION = [
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    operators.forward._opoverload,
]
POLICIES = (
    lambda *_, **__: CheckpointPolicy.MUST_SAVE,
    lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE,
    PRODUCTS_AND_ATTENTION,
)
REST = ("lucid", "gated_delta", "laser", "path", "mlstm", "ccq", "differential", "mesa")
thorough = partial(pytest.param, marks=pytest.mark.thorough)


def gradients(call, block, x, is_cast):
    with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
        out = call(block, x)
    return torch.autograd.grad((out * out.sin()).sum(), [x, *block.parameters()])


@pytest.mark.parametrize("expression", ["softmax", *map(thorough, REST)])
@pytest.mark.parametrize("is_cast", [False, True])
def test_a_block_has_the_gradient_of_the_plain_call(expression, is_cast):
    torch.manual_seed(0)
    block, calls = Block(32, heads=2, mechanism=expression), []
    block.attention.register_forward_hook(lambda *_: calls.append(None))
    x = torch.randn(2, 20, 32, requires_grad=True)
    expected = gradients(lambda block, x: block(x), block, x, is_cast)
    bounds = {"rtol": 2e-2, "atol": 2e-2} if is_cast else {"rtol": 1e-4, "atol": 1e-5}
    for policy in POLICIES:
        calls.clear()
        call = partial(checkpoint, use_reentrant=False, context_fn=partial(contexts, policy))
        found = gradients(call, block, x, is_cast)
        assert len(calls) <= 2  # The call, and its computation from what is stored.
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one / other.abs().max(), other / other.abs().max(), **bounds)
