"""Recipes that are options, against the same written out."""

import math

import pytest

pytest.importorskip("torch")

import torch

import precondattn as pa
from precondattn.layers.functions import log_decay
from precondattn.layers.norm_order import gains
from precondattn.layers.recipes import NormedRotary, Rotary, StepOfSolve, UnitConvolution
from precondattn.layers.torch import Attention
from tests.layers.torch_layers import by_declared_axes


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def test_a_norm_before_rope_is_that_of_qwen3():
    norm = NormedRotary(theta=100.0)
    attn = Attention(
        24, heads=4, kv_heads=2, head_dim=6, recipes={"q": norm, "k": norm}, dtype=torch.float64
    )
    with torch.no_grad():
        for name in "qk":
            attn.inputs[name].gain.normal_()
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    angle = torch.arange(5.0)[:, None] * 100 ** (-torch.arange(0, 6, 2) / 6)
    turn = torch.polar(torch.ones(()), angle).to(torch.complex128)[:, None]

    weights = by_declared_axes(attn)

    def rows(name):
        y = torch.einsum("btx,xhd->bthd", x, weights[name]["weight"])
        y = torch.nn.functional.rms_norm(y, (6,), attn.inputs[name].gain, 1e-6)
        turned = torch.complex(y[..., :3], y[..., 3:]) * turn
        return torch.cat([turned.real, turned.imag], -1)

    v = torch.einsum("btx,xhd->bthd", x, weights["v"]["weight"])
    o = pa.softmax(rows("q"), rows("k"), v)
    expected = torch.einsum("bthd,hdx->btx", o, weights["out"]["projection"])
    torch.testing.assert_close(attn(x), expected, rtol=1e-6, atol=1e-6)


GAINED = (
    "qk_norm[gain=true]",
    "qk_norm[norm=layer,gain=true](deltaformer)",
    "lucid(qk_norm[norm=l2,gain=true])",
    "differential(qk_norm[gain=true])",
)


def with_gains(mechanism, recipes=None):
    """A layer with random gains, and those by the name of what is normed."""
    attn = Attention(24, heads=4, mechanism=mechanism, recipes=recipes, dtype=torch.float64)
    gains = {
        name.split(".")[1].removesuffix("_gain"): gain
        for name, gain in attn.named_parameters()
        if name.startswith("inputs.") and "gain" in name and ".out." not in name
    }
    with torch.no_grad():
        for gain in gains.values():
            gain.normal_()
    return attn, gains


@pytest.mark.parametrize("mechanism", GAINED)
@torch.no_grad()
def test_scores_with_a_gain_depend_on_differences_of_positions_alone(mechanism):
    """A gain that acts on rotated rows is the other order, which is the same without a rotation."""
    x, nowhere = torch.randn(2, 5, 24, dtype=torch.float64), torch.zeros(5, dtype=torch.int64)
    attn, normed = with_gains(mechanism)
    after, last = with_gains(mechanism, gains(pa.parse(mechanism)))
    for layer, least, most in ((attn, 0, 1e-10), (after, 1e-3, 1e3)):
        moved = (layer(x, positions=torch.arange(5) + 17) - layer(x)).abs().max()
        assert least <= moved < most
    if mechanism.startswith("differential"):
        return  # In the other order, both of its maps have the same gains.
    assert normed.keys() == last.keys() == {"q", "k"}
    named = dict(attn.named_parameters())
    for name, weight in after.named_parameters():
        weight.copy_(named[name.replace("_gain.weight", ".gain")])
    torch.testing.assert_close(attn(x, positions=nowhere), after(x, positions=nowhere))


def test_a_rotation_that_is_given_stays_behind_the_norm():
    slow = {name: Rotary(theta=7.0) for name in "qk"}
    made = with_gains("qk_norm[eps=1e-3,gain=true]", slow)[0].plan
    normed = NormedRotary(theta=7.0, eps=1e-3)
    assert str(made.mechanism) == "softmax"
    assert [entry.recipe for entry in made.entries[:2]] == [normed] * 2
    with pytest.raises(ValueError, match="norm must be 'rms', 'layer' or 'l2'; found 'max'"):
        NormedRotary(norm="max")


def test_w_of_path_may_have_a_full_map_where_queries_share_keys():
    full = {"w": UnitConvolution(size=3)}
    attn = Attention(24, heads=4, kv_heads=2, head_dim=6, mechanism="path", recipes=full)
    shapes = {name: tuple(p.shape) for name, p in by_declared_axes(attn)["w"].items()}
    assert shapes == {"convolution": (3, 2, 6), "weight": (24, 2, 6)}
    x = torch.randn(1, 5, 24)
    first, cache = attn(x[:, :3], cache=attn.init_cache(1, 5))
    last, _ = attn(x[:, 3:], cache=cache)
    torch.testing.assert_close(torch.cat([first, last], 1), attn(x), rtol=1e-4, atol=1e-5)


def test_lucid_with_weights_is_lucid_where_they_are_not_yet_learned():
    attn, plain = (Attention(24, heads=4, mechanism=m) for m in ("lucid[beta=true]", "lucid"))
    assert StepOfSolve() in [entry.recipe for entry in attn.plan.entries]
    torch.nn.init.zeros_(attn.lucid_beta_proj.weight)
    plain.load_state_dict(attn.state_dict(), strict=False)
    x = torch.randn(1, 6, 24)
    torch.testing.assert_close(attn(x), plain(x))


def gradients_of_saturated(text, value, dtype):
    """The gradients if A_log, or the bias of a gate, is `value`."""
    torch.manual_seed(0)
    attn, x = Attention(16, heads=2, mechanism=text), torch.randn(1, 12, 16)
    with torch.no_grad():
        for name, p in attn.named_parameters():
            if "A_log" in name or name == "g_up_proj.bias":
                p.fill_(value)
    y = attn.to(dtype)(x.to(dtype).requires_grad_())
    return torch.autograd.grad(y.float().square().sum(), list(attn.parameters()))


@pytest.mark.parametrize("text", ["gated_delta", "kda", "ssd", "comba", "atk(kda)", "rwkv6", "gla"])
@pytest.mark.parametrize("value", [12.0, 89.0, 120.0])
def test_gradients_of_saturated_gates_are_those_of_float64(value, text):
    expected = gradients_of_saturated(text, value, torch.float64)
    largest = max(d.abs().max().item() for d in expected)
    for d, right in zip(gradients_of_saturated(text, value, torch.float32), expected, strict=True):
        torch.testing.assert_close(d.double(), right, rtol=0, atol=1e-4 * largest)
    for dtype in (torch.bfloat16, torch.float16):
        assert all(d.isfinite().all() for d in gradients_of_saturated(text, value, dtype))


@pytest.mark.parametrize("a", [0.5, 80.0, 89.0, 90.0])
def test_decays_and_their_gradients_are_right_where_only_the_rate_exceeds_the_range(a):
    rate, step = torch.tensor(a, requires_grad=True), torch.tensor(-87.0).exp()
    g = log_decay(rate, step)
    for found in (g.item(), torch.autograd.grad(g, rate)[0].item()):
        assert found == pytest.approx(-math.exp(a - 87), rel=1e-4)
