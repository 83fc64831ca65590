"""Layers of PyTorch under its own machinery: autocast, compilers, checkpointing, meta, FSDP2."""

import copy

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn.utils import prune

from precondattn.layers.torch import Block
from tests.layers.fsdp_process import fsdp_process
from tests.layers.layer_cases import MECHANISMS
from tests.layers.torch_layers import FEW, hidden, made


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("expression", FEW)
def test_bfloat16_weights_and_autocast(expression):
    attn, x = made(expression, dtype=torch.float32), hidden(2, 6, dtype=torch.float32)
    expected = attn(x)
    half = copy.deepcopy(attn).to(torch.bfloat16)
    y = half(x.bfloat16())
    assert y.dtype == torch.bfloat16
    assert (y.float() - expected).norm() < 0.03 * expected.norm()
    _, cache = half(x[:, :4].bfloat16(), cache=half.init_cache(2, 8))
    last, _ = half(x[:, 4:].bfloat16(), cache=cache)
    assert (last.float() - expected[:, 4:]).norm() < 0.05 * expected.norm()
    with torch.autocast("cpu", torch.bfloat16):
        y = attn(x)
        cache = attn.init_cache(2, 8)
        _, cache = attn(x[:, :4], cache=cache)
        last, _ = attn(x[:, 4:], cache=cache)
    assert y.dtype == torch.bfloat16
    assert (y.float() - expected).norm() < 0.03 * expected.norm()
    assert (last.float() - expected[:, 4:]).norm() < 0.05 * expected.norm()
    y.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in attn.parameters())


@pytest.mark.thorough
@pytest.mark.parametrize("expression", ["ccq(gated_delta)"])
def test_a_compiled_layer_is_one_graph_and_gives_the_same(expression):
    torch._dynamo.reset()
    attn, x = made(expression, dtype=torch.float32), hidden(2, 9, dtype=torch.float32)
    compiled = torch.compile(attn, fullgraph=True, backend="aot_eager")
    y = compiled(x)
    torch.testing.assert_close(y, attn(x), rtol=1e-4, atol=1e-5)
    y.sum().backward()
    gradients = {name: p.grad.clone() for name, p in attn.named_parameters()}
    attn.zero_grad()
    attn(x).sum().backward()
    for name, parameter in attn.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        _, cache = attn(x[:, :8], cache=attn.init_cache(2, 16))
        out, _ = compiled(x[:, 8:], cache=cache)
        torch.testing.assert_close(out, attn(x)[:, 8:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("expression", ["lucid", "gated_delta"])
def test_a_layer_is_exported_for_any_batch_and_length(expression):
    attn = made(expression, dtype=torch.float32)
    sizes = {"x": {0: torch.export.Dim("b", max=64), 1: torch.export.Dim("t", min=4, max=512)}}
    x = hidden(2, 9, dtype=torch.float32)
    program = torch.export.export(attn, (x,), dynamic_shapes=sizes)
    other = hidden(3, 14, dtype=torch.float32)
    torch.testing.assert_close(program.module()(other), attn(other), rtol=1e-4, atol=1e-5)


def test_activation_checkpointing_gives_the_same_gradients():
    attn, x = made("gated_delta"), hidden(1, 6)
    attn(x).sum().backward()
    expected = [p.grad.clone() for p in attn.parameters()]
    attn.zero_grad()
    torch.utils.checkpoint.checkpoint(attn, x, use_reentrant=False).sum().backward()
    for parameter, gradient in zip(attn.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_a_layer_made_on_meta_is_filled_later():
    attn = made("hedgehog(gla)", device="meta")
    assert all(p.is_meta for p in attn.parameters())
    attn = attn.to_empty(device="cpu")
    attn.reset_parameters()
    assert torch.equal(attn.inputs["q_weight"].weight, torch.eye(6, dtype=torch.float64))
    assert torch.isfinite(attn(hidden(1, 5))).all()


@pytest.mark.thorough
@pytest.mark.parametrize("count", [1, 2])
def test_fsdp_shards_a_layer_and_gives_the_same(tmp_path, count):
    """Each process has one sequence; gradients are the means over them."""
    torch.multiprocessing.spawn(fsdp_process, (count, tmp_path), nprocs=count)
    assert (tmp_path / f"done {count - 1}").exists()


NAMES = {
    "softmax": "q_proj.weight k_proj.weight v_proj.weight o_proj.weight",
    "gated_delta": (
        "q_proj.weight inputs.q.convolution k_proj.weight inputs.k.convolution "
        "v_proj.weight inputs.v.convolution g_proj.weight inputs.g.dt_bias inputs.g.A_log "
        "beta_proj.weight inputs.out.gain o_gate_proj.weight o_proj.weight"
    ),
    "differential": (
        "q_proj.weight k_proj.weight v_proj.weight q2_proj.weight k2_proj.weight "
        "inputs.lam.q1 inputs.lam.k1 inputs.lam.q2 inputs.lam.k2 inputs.out.gain o_proj.weight"
    ),
    "path[forget=scaled]": (
        "q_proj.weight k_proj.weight v_proj.weight w_down_proj.weight w_up_proj.weight "
        "inputs.w.convolution beta_proj.weight beta_proj.bias g_proj.weight g_proj.bias "
        "o_proj.weight"
    ),
}


@pytest.mark.parametrize("expression", NAMES)
def test_names_of_a_state_dict_stay(expression):
    assert set(made(expression).state_dict()) == set(NAMES[expression].split())


@pytest.mark.parametrize("expression", MECHANISMS)
def test_a_layer_is_a_function_of_its_weights(expression):
    """No weight has to be an `nn.Parameter` while a layer runs."""
    attn, x = made(expression), hidden(1, 5)
    weights = {name: 1.5 * p.detach() for name, p in attn.named_parameters()}
    y = torch.func.functional_call(attn, weights, (x,))
    with torch.no_grad():
        for parameter in attn.parameters():
            parameter *= 1.5
    torch.testing.assert_close(y, attn(x), rtol=1e-9, atol=1e-9)


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


@pytest.mark.parametrize("expression", ["softmax", "ccq(gla)"])
def test_an_ensemble_is_one_call_of_stacked_weights(expression):
    layers, x = [made(expression) for _ in range(2)], hidden(2, 5)
    weights, _ = torch.func.stack_module_state(layers)

    def call(weights):
        return torch.func.functional_call(layers[0], weights, (x,))

    together = torch.func.vmap(call)(weights)
    for y, attn in zip(together, layers, strict=True):
        torch.testing.assert_close(y, attn(x))


@pytest.mark.parametrize("expression", ["path[forget=scaled]", "ssd"])
def test_maps_are_linear_modules_that_tools_prune_norm_and_replace(expression):
    attn, x = made(expression), hidden(2, 5)
    expected, maps = attn(x), [of_map.name for of_map in attn.plan.maps]
    assert all(type(attn.get_submodule(name)) is nn.Linear for name in maps)
    called = []
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

    class Adapted(nn.Module):
        """What adapters put in the place of a linear map."""

        def __init__(self, base):
            super().__init__()
            self.base, self.weight = base, base.weight
            self.low = nn.Parameter(torch.ones(base.out_features, 1, dtype=torch.float64))

        def forward(self, x):
            return self.base(x) + x.mean(-1, keepdim=True) * self.low.T

    class Quantized(nn.Module):
        """What quantization puts there, without a weight in floating point."""

        def __init__(self, base):
            super().__init__()
            self.step = base.weight.detach().abs().max() / 127
            self.register_buffer(
                "weight", (base.weight.detach() / self.step).round().to(torch.int8)
            )

        def forward(self, x):
            return x @ (self.weight.to(x.dtype) * self.step.to(x.dtype)).T

    attn = made(expression, dtype=torch.float32)
    expected = attn(x.float())
    attn.o_proj = Quantized(attn.o_proj)
    assert (attn(x.float()) - expected).norm() < 0.05 * expected.norm()
    _, cache = attn(x.float(), cache=attn.init_cache(2, 8))
    assert all(buffer.dtype == torch.float32 for buffer in cache.store.values())

    attn = made(expression)
    before = attn(x)
    attn.o_proj = Adapted(attn.o_proj)
    assert not torch.allclose(attn(x), before)
    attn(x).sum().backward()
    assert attn.o_proj.low.grad.abs().sum() > 0
