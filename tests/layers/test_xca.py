"""XCiT's block with public weights, and what it refuses."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from precondattn.layers.torch import LocalPatchInteraction, XCABlock, from_timm
from tests.layers.test_public_layers import assert_close

FIXTURE = Path(__file__).parent / "peers" / "xca_block.npz"


def test_a_block_with_public_weights_gives_the_public_output_and_gradients():
    with np.load(FIXTURE) as entries:
        given = {name: torch.tensor(entries[name]) for name in entries if name != "versions"}
    weights, gradients = (
        from_timm({n.removeprefix(p): a for n, a in given.items() if n.startswith(p)}, heads=4)
        for p in ("weight.", "grad.")
    )
    mechanism = "cross_covariance[eps=1e-24]"
    block = XCABlock(32, heads=4, mechanism=mechanism, hidden=48, eps=1e-5).eval()
    missing = block.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys
    assert all("running" in name or "batches" in name for name in missing.missing_keys)
    x = given["x"].requires_grad_()
    y = block(x, grid=(3, 4))
    (y * given["cotangent"]).sum().backward()
    assert_close(y.detach(), given["out"].numpy(), "out")
    assert_close(x.grad, given["grad_x"].numpy(), "x")
    for name, gradient in gradients.items():
        assert_close(block.get_parameter(name).grad, gradient.numpy(), name)


def test_only_the_local_patch_interaction_depends_on_the_order_of_tokens():
    torch.manual_seed(0)
    block, x = XCABlock(8, heads=2).eval().double(), torch.randn(1, 12, 8, dtype=torch.float64)
    order = torch.randperm(12)
    assert not torch.allclose(block(x[:, order], (3, 4)), block(x, (3, 4))[:, order])
    torch.nn.init.zeros_(block.gamma3)
    torch.testing.assert_close(block(x[:, order], (3, 4)), block(x, (3, 4))[:, order])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: LocalPatchInteraction(8, size=4), "size must be an odd whole number"),
        (lambda: LocalPatchInteraction(8)(torch.zeros(1, 6, 4), (2, 3)), r"x must have the shape"),
        (
            lambda: LocalPatchInteraction(8)(torch.zeros(1, 6, 8), (2, 4)),
            "2 rows and 4 columns have 8 tokens; found t = 6",
        ),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
