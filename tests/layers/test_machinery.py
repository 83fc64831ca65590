"""Layers of PyTorch under its own machinery: autocast, compilers, checkpoints, meta, transforms."""

import copy
from functools import partial

import pytest

pytest.importorskip("torch")

import pytest
import torch
from make_pages import DOCS, MODEL, count, fits, with_sizes
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import CheckpointPolicy, checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts as contexts

from precondattn.frameworks.torch import operators  # noqa: F401  It defines the operators.
from precondattn.layers.torch import Block
from tests.layers.torch_layers import FEW, hidden, made


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def differs(found, expected):
    return (found.float() - expected).detach().norm() / expected.detach().norm()


@pytest.mark.parametrize("expression", FEW)
def test_bfloat16_weights_and_autocast(expression):
    attn, x = made(expression, dtype=torch.float32), hidden(2, 6, dtype=torch.float32)
    half, expected = copy.deepcopy(attn).to(torch.bfloat16), attn(x)
    for model, given, is_cast in ((half, x.bfloat16(), False), (attn, x, True)):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            y = model(given)
            _, cache = model(given[:, :4], cache=model.init_cache(2, 8))
            last, _ = model(given[:, 4:], cache=cache)
        assert y.dtype == torch.bfloat16
        assert differs(y, expected) < 0.03
        assert differs(last, expected[:, 4:]) < 0.05
    y.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in attn.parameters())


@pytest.mark.thorough
def test_a_compiled_layer_is_one_graph_and_gives_the_same():
    torch._dynamo.reset()
    attn, x = made("ccq(gated_delta)", dtype=torch.float32), hidden(2, 9, dtype=torch.float32)
    compiled = torch.compile(attn, fullgraph=True, backend="aot_eager")
    y = compiled(x)
    torch.testing.assert_close(y, attn(x), rtol=1e-4, atol=1e-5)
    found, expected = (torch.autograd.grad(z.sum(), [*attn.parameters()]) for z in (y, attn(x)))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        _, cache = attn(x[:, :8], cache=attn.init_cache(2, 16))
        out, _ = compiled(x[:, 8:], cache=cache)
        torch.testing.assert_close(out, attn(x)[:, 8:], rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_compiled_calls_with_new_caches_warn_of_nothing():
    """Warnings are errors here, and Dynamo warns of an `lru_cache` that it passes over."""
    torch._dynamo.reset()
    attn, x = made("ccq(gated_delta)", dtype=torch.float32), hidden(2, 5, dtype=torch.float32)
    compiled = torch.compile(lambda x: attn(x, cache=attn.init_cache(2, 8))[0], backend="aot_eager")
    torch.testing.assert_close(compiled(x), attn(x), rtol=1e-4, atol=1e-5)


@pytest.mark.thorough(but=("lucid",))
@pytest.mark.parametrize("expression", ["lucid", "gated_delta"])
def test_a_layer_is_exported_for_any_batch_and_length(expression):
    attn = made(expression, dtype=torch.float32)
    sizes = {"x": {0: torch.export.Dim("b", max=64), 1: torch.export.Dim("t", min=4, max=512)}}
    x, other = (hidden(*shape, dtype=torch.float32) for shape in ((2, 9), (3, 14)))
    program = torch.export.export(attn, (x,), dynamic_shapes=sizes)
    torch.testing.assert_close(program.module()(other), attn(other), rtol=1e-4, atol=1e-5)


ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.precondattn.forward,
)
POLICIES = (
    lambda *_, **__: CheckpointPolicy.MUST_SAVE,
    lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE,
    [operator.default for operator in (torch.ops.aten.mm, torch.ops.aten.bmm, *ATTENTION)],
)


@pytest.mark.thorough(but=("False-softmax", "True-softmax", "False-gated_delta"))
@pytest.mark.parametrize(
    "expression", ["softmax", "lucid", "gated_delta", "path", "mlstm", "differential", "mesa"]
)
@pytest.mark.parametrize("is_cast", [False, True])
def test_checkpoints_change_no_gradient_whatever_they_store(expression, is_cast):
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


def test_a_layer_made_on_meta_is_filled_later():
    attn = made("hedgehog(gla)", device="meta")
    assert all(p.is_meta for p in attn.parameters())
    attn = attn.to_empty(device="cpu")
    attn.reset_parameters()
    assert torch.equal(attn.inputs["q_weight"].weight, torch.eye(6, dtype=torch.float64))
    assert torch.isfinite(attn(hidden(1, 5))).all()


@pytest.mark.parametrize("expression", ["lucid", "gated_delta"])
def test_gradients_of_each_sample_are_those_of_each_alone(expression):
    model = Block(24, heads=4, mechanism=expression, dtype=torch.float64)
    x, weights = hidden(3, 5), {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights, x):
        return torch.func.functional_call(model, weights, (x[None],)).square().sum()

    gradients = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, x)
    for i in range(3):
        model.zero_grad()
        model(x[i : i + 1]).square().sum().backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name][i], parameter.grad, msg=name)


class Quantized(nn.Module):
    """A map in the place of another one, without a weight in floating point."""

    def __init__(self, base):
        super().__init__()
        self.step = base.weight.detach().abs().max() / 127
        self.register_buffer("weight", (base.weight.detach() / self.step).round().to(torch.int8))

    def forward(self, x):
        return x @ (self.weight.to(x.dtype) * self.step.to(x.dtype)).T


def test_a_layer_takes_a_map_in_int8():
    attn, x = made("ssd", dtype=torch.float32), hidden(2, 5, dtype=torch.float32)
    expected = attn(x)
    attn.o_proj = Quantized(attn.o_proj)
    y, cache = attn(x, cache=attn.init_cache(2, 8))
    assert differs(y, expected) < 0.05
    assert all(buffer.dtype == torch.float32 for buffer in cache.store.values())


@pytest.mark.parametrize("expression", ["path[forget=scaled]", "ssd"])
def test_maps_are_linear_modules_that_tools_hook_norm_and_prune(expression):
    attn, x, called = made(expression), hidden(2, 5), []
    expected, maps = attn(x), [of_map.name for of_map in attn.plan.maps]
    assert all(type(attn.get_submodule(name)) is nn.Linear for name in maps)
    for name in maps:
        attn.get_submodule(name).register_forward_hook(lambda *_, name=name: called.append(name))
    torch.testing.assert_close(attn(x), expected)
    assert sorted(called) == sorted(maps)
    for name in maps:
        nn.utils.parametrizations.weight_norm(attn.get_submodule(name))
    torch.testing.assert_close(attn(x), expected)
    attn.init_cache(2, 8)

    attn = made(expression)
    prune.l1_unstructured(attn.o_proj, "weight", 0.5)
    attn(x).sum().backward()
    assert ((attn.o_proj.weight_orig.grad == 0) == (attn.o_proj.weight_mask == 0)).all()


PAGE = DOCS / "paper_models.md"
MODELS = MODEL.findall(PAGE.read_text(encoding="utf-8"))


@pytest.mark.thorough
def test_the_page_is_up_to_date():
    assert len(MODELS) == 24
    assert PAGE.read_text(encoding="utf-8") == with_sizes(PAGE), "run python docs/make_pages.py"


@pytest.mark.parametrize(("mlp", "maps"), [("plain", 2), ("gated", 3)])
def test_counts_are_those_of_the_maps_the_norms_and_the_embedding(mlp, maps):
    layers, width, heads, head, hidden = 32, 3440, 16, 720, 11584
    block = 4 * width * heads * head + maps * width * hidden + 2 * width
    layer = {"mechanism": "laser", "head_dim": head}
    model = f"Decoder(32_000, {width}, heads={heads}, layers=[{layer}] * {layers}, hidden={hidden}"
    assert count(f'{model}, mlp="{mlp}")') == layers * block + width + 32_000 * width
    of_heads = 2 * 2048 * 68 * (32 + 4)  # Few key heads make smaller maps.
    layer = {"mechanism": "lucid", "kv_heads": 4, "head_dim": 68}
    model = f"Decoder(32_000, 2048, heads=32, hidden=5632, layers=[{layer}] * 22)"
    expected = 22 * (of_heads + 3 * 2048 * 5632 + 2 * 2048) + 2048 + 32_000 * 2048
    assert count(model) == expected


@pytest.mark.thorough
def test_only_one_stated_number_does_not_fit():
    misfits = [name for name, call, stated in MODELS if stated and not fits(count(call), stated)]
    assert misfits == ["Figure 5, width 1,024"]


@pytest.mark.parametrize(
    ("counted", "stated", "is_fit"),
    [(1_149_999_999, "1.1B", True), (1_150_000_001, "1.1B", False), (474_375_546, "500M", True)],
)
def test_a_number_fits_if_it_rounds_to_the_stated_one(counted, stated, is_fit):
    assert fits(counted, stated) is is_fit
