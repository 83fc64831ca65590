"""PyTorch's selective checkpoints: which operations they store changes no gradient of a layer."""

from functools import partial

import pytest

pytest.importorskip("torch")

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts as contexts

from precondattn.frameworks.torch import operators  # noqa: F401  It defines the operators.
from precondattn.layers.torch import Block

ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.precondattn.forward,
)
PRODUCTS = torch.ops.aten.mm, torch.ops.aten.bmm
POLICIES = (
    lambda *_, **__: CheckpointPolicy.MUST_SAVE,
    lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE,
    [operator.default for operator in (*PRODUCTS, *ATTENTION)],
)
REST = ("lucid", "gated_delta", "laser", "path", "mlstm", "ccq", "differential", "mesa")
thorough = partial(pytest.param, marks=pytest.mark.thorough)


@pytest.mark.parametrize("expression", ["softmax", *map(thorough, REST)])
@pytest.mark.parametrize("is_cast", [False, True])
def test_a_block_has_the_gradient_of_the_plain_call(expression, is_cast):
    torch.manual_seed(0)
    # Mesa's iteration enlarges the last bits, in which norms under a checkpoint may differ.
    dtype, calls = torch.float32 if is_cast else torch.float64, []
    block = Block(32, heads=2, mechanism=expression, dtype=dtype)
    block.attention.register_forward_hook(lambda *_: calls.append(None))
    x = torch.randn(2, 20, 32, dtype=dtype, requires_grad=True)

    def gradients(call):
        calls.clear()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            out = call(block, x)
        found = torch.autograd.grad((out * out.sin()).sum(), [x, *block.parameters()])
        assert len(calls) <= 2  # The call, and its computation from what is stored.
        return [gradient / gradient.abs().max() for gradient in found]

    bounds = {"rtol": 2e-2, "atol": 2e-2} if is_cast else {"rtol": 1e-4, "atol": 1e-5}
    expected = gradients(lambda block, x: block(x))
    for policy in POLICIES:
        call = partial(checkpoint, use_reentrant=False, context_fn=partial(contexts, policy))
        torch.testing.assert_close(gradients(call), expected, **bounds)
