"""Vision layers of PyTorch: timm's weights and numbers, any mechanism, and what they refuse."""

import re

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from precondattn.layers.recipes import Rotary
from precondattn.layers.torch import VisionAttention, VisionTransformer
from precondattn.layers.vision import vision_recipes
from tests.layers.test_public_layers import assert_close, saved_entries

WINDOWS = "windowed[size=2/3,grid=4/6,bias=true]"
SHIFTED = "windowed[size=2/3,shift=1/2,grid=4/6,bias=true]"


class OfRows(torch.nn.Module):
    """A vision transformer of images as rows of pixels, as its fixture has them."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x.reshape(-1, 3, 6, 8)).reshape(x.shape)


def attention(mechanism):
    return lambda: VisionAttention(32, heads=4, mechanism=mechanism)


def transformer(**options):
    sizes = {"heads": 4, "blocks": 2, "classes": 144, "hidden": 24, **options}
    return VisionTransformer((6, 8), 2, 16, **sizes)


LAYERS = {
    "vit_attention": attention("softmax[causal=false]"),
    "window": attention(WINDOWS),
    "window_shifted": attention(SHIFTED),
    "xca": attention("cross_covariance[eps=1e-24]"),
    "outlook": attention("outlook[stride=2,grid=5/4]"),
    "channel": attention("channel"),
    "channel_by_tokens": attention("channel[scale_by=tokens]"),
    "vision_transformer": lambda: OfRows(transformer()),
}


NAMES = {
    r"(^|attn\.)proj\.": r"\1o_proj.",
    r"^attn\.": "logits_proj.",
    r"^v\.": "v_proj.",
    "relative_position_bias_table": "inputs.bias_table.weight",
    "temperature": "inputs.logit_scale.weight",
}
"""Our names of timm's weights, as patterns."""


def from_timm(weights, order):
    """Arrays by our names; `order` is that of q, k and v in timm's one matrix."""
    ours = {}
    for name, array in weights.items():
        place, is_qkv, kind = name.rpartition("qkv.")
        if is_qkv:
            parts = zip(order, array.chunk(3), strict=True)
            ours |= {f"{place}{row}_proj.{kind}": part for row, part in parts}
        else:
            for pattern, other in NAMES.items():
                name = re.sub(pattern, other, name)
            ours[name] = array.flatten() if name.endswith("logit_scale.weight") else array
    return ours


OF_TOKENS = ("vit_attention", "window", "window_shifted", "vision_transformer")
"""The layers whose keys are tokens."""


@pytest.mark.parametrize("name", LAYERS)
def test_timms_weights_load_and_give_timms_outputs_and_gradients(name):
    layer = LAYERS[name]()
    model = layer.model if isinstance(layer, OfRows) else layer
    saved = saved_entries(name)
    given = {key: torch.tensor(array) for key, array in saved.items() if key != "versions"}
    order = "vqk" if name == "channel" else "qkv"
    weights, gradients = (
        from_timm({n[len(p) :]: a for n, a in given.items() if n.startswith(p)}, order)
        for p in ("weight.", "grad.")
    )
    model.load_state_dict(weights)
    x = given["x"].requires_grad_()
    y = layer(x)
    (y * given["cotangent"]).sum().backward()
    out = given["out"].numpy()
    assert np.abs(y.detach().numpy() - out).max() <= 1e-6 * np.abs(out).max()
    assert_close(x.grad, given["grad_x"].numpy(), "x")
    for key, gradient in gradients.items():
        # One bias of all keys moves all scores of a query alike: its gradient is 0, up to rounding.
        is_zero = key.endswith("k_proj.bias") and name in OF_TOKENS
        terms = gradients[key.replace("bias", "weight")] if is_zero else gradient
        found = model.get_parameter(key).grad
        assert_close(found, gradient.numpy(), key, terms.numpy())


@pytest.mark.parametrize(
    "mechanism",
    [
        "row_normalized(laser(softmax[causal=false]))",
        "differential(qk_norm(softmax[causal=false]))",
        ["outlook[stride=2,grid=3/4]", "row_normalized(outlook[grid=4])"],
        ["windowed[size=2,grid=3/4,bias=true]", "row_normalized(windowed[size=2,shift=1,grid=4])"],
        "gated_delta",
    ],
)
def test_a_vision_transformer_of_any_mechanism_has_finite_gradients(mechanism):
    torch.manual_seed(0)
    model = transformer(mechanism=mechanism, pool="mean", classes=5)
    images, classes = torch.randn(6, 3, 6, 8), torch.tensor([0, 1, 2, 3, 4, 0])
    torch.nn.functional.cross_entropy(model(images), classes).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@torch.no_grad()
def test_a_model_made_on_meta_is_filled_and_autocast_is_followed():
    model = transformer(device="meta").to_empty(device="cpu")
    model.reset_parameters()
    images = torch.randn(2, 3, 6, 8)
    expected = model(images)
    assert expected.isfinite().all()
    with torch.autocast("cpu", torch.bfloat16):
        found = model(images)
    assert (found.float() - expected).norm() < 0.05 * expected.norm()
    assert model.to(torch.bfloat16)(images.bfloat16()).dtype == torch.bfloat16


def test_recipes_that_are_more_than_linear_maps_stay():
    recipes = vision_recipes("differential(softmax[causal=false])", qkv_bias=False)
    assert not any(recipe.bias for recipe in recipes.values())
    assert set(recipes) == {"q", "k", "v", "q2", "k2"}
    assert vision_recipes("gated_delta") == {}
    logits = vision_recipes("outlook[grid=3/4]", qkv_bias=False)
    assert (logits["logits"].bias, logits["v"].bias) == (True, False)
    attn = VisionAttention(8, heads=2, recipes={"q": Rotary()})
    assert {entry.name: repr(entry.recipe) for entry in attn.plan.entries}["q"].startswith("Rotary")


def test_a_table_of_biases_starts_as_in_swin():
    torch.manual_seed(0)
    mechanism = "windowed[size=7,grid=7/7,bias=true]"
    table = VisionAttention(32, heads=16, mechanism=mechanism).inputs["bias_table"].weight
    assert table.shape == (169, 16)
    assert 0.019 < table.std() < 0.021
    assert table.mean().abs() < 0.002


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"patch": 4}, ValueError, r"4 x 4 pixels must divide the image; found image=\(6, 8\)"),
        ({"patch": (2, 2, 2)}, ValueError, "patch must be one number, or rows and columns"),
        ({"width": 16.0}, TypeError, "width must be a whole number; found 16.0"),
        ({"pool": "max"}, ValueError, "pool must be 'token' or 'mean'; found 'max'"),
        ({"mechanism": ["softmax[causal=false]"]}, ValueError, "one for each of 2; found"),
        (
            {"mechanism": "lucid(laser)"},
            ValueError,
            r"the class token.*; use lucid\(laser\(softmax\[causal=false\]\)\), or",
        ),
        ({"mechanism": "ccq(gla)"}, ValueError, "use another mechanism, or pool='mean'"),
        ({"mechanism": 3, "pool": "mean"}, ValueError, "mechanism must be one for all blocks"),
        ({"mechanism": [3, 3]}, TypeError, "mechanism must be a text or a mechanism; found 3"),
        ({"qkv_bias": 1}, TypeError, "qkv_bias must be True or False; found 1"),
        ({"heads": 3}, ValueError, "heads: 3 query heads must divide the width 16"),
    ],
)
def test_bad_sizes_are_named(options, error, message):
    sizes = {"image": (6, 8), "patch": 2, "width": 16, "heads": 4, "blocks": 2, "classes": 3}
    with pytest.raises(error, match=message):
        VisionTransformer(**{**sizes, **options})


@pytest.mark.parametrize(
    ("options", "images", "error", "message"),
    [
        ({}, (2, 3, 8, 6), ValueError, r"x must have shape \(b, 3, 6, 8\); found \(2, 3, 8, 6\)"),
        (
            {"dtype": torch.float64},
            (2, 3, 6, 8),
            TypeError,
            r"x must be torch\.float64, as the weights",
        ),
        (
            {"mechanism": "windowed[size=2,grid=3/4]"},
            (2, 3, 6, 8),
            ValueError,
            "3 rows and 4 columns has 12 tokens; found s = 13",
        ),
    ],
)
def test_bad_images_are_named(options, images, error, message):
    with pytest.raises(error, match=message):
        transformer(**options)(torch.zeros(images))
