"""Save outputs and gradients of public layers, so that tests compare without installing them.

Layers of Transformers with small widths, random weights, and few digits in x:

    llama           LlamaAttention: two key/value heads for four query heads, rotary positions
    diffllama       DiffLlamaAttention with layer_idx=1: two pairs of query heads, one of keys
    qwen3_next      Qwen3NextGatedDeltaNet: two key heads, four value heads
    mamba2          Mamba2Mixer: two groups, four heads
    xlstm           xLSTMLayer, token by token: four heads
    nystromformer   NystromformerSelfAttention: 3 landmarks, a convolution of 5 tokens, and a
                    linear map of its output

of timm,

    xca             XCA: four heads, q, k and v with a bias
    vit_attention   Attention of vision transformers: q, k and v with a bias
    window          WindowAttention with the windows around it, of 2 × 3 tokens on a grid of 4 × 6
    window_shifted  the same, shifted by 1 row and 2 columns
    vision_transformer
                    VisionTransformer with two blocks, for images of 3 × 6 × 8, which x has as rows
                    of 48 pixels. It has as many logits, 144, as an image has numbers, so that out
                    has the shape of x
    outlook         OutlookAttention of VOLO with a stride of 2, on a grid of 5 × 4: a bias of v
    channel         ChannelAttention of DaViT: q, k and v with a bias
    channel_by_tokens
                    ChannelAttentionV2 of Florence-2, whose logits are divided by √N

and of flash-linear-attention (`fla_layers.py`). `results.npz` has the entries of each as
NAME/ENTRY, all in float32:

    x               (batch, time, width)
    out, cotangent  of the same shape
    grad_x          the gradient of sum(out * cotangent)
    weight.*        every parameter, by its public name
    grad.*          its gradient

To run it, in an environment of its own:

    python -m pip install -e '.[peers]' && python tests/layers/peers/make_fixtures.py [NAME ...]
"""

import functools
import importlib
import importlib.metadata
import inspect
import sys
from pathlib import Path

import numpy as np
import torch

# Transformers and timm are imported where they are used: pytest imports this file to collect it.

RESULTS = Path(__file__).with_name("results.npz")
BATCH, TIME = 2, 11
TIMES = {
    "nystromformer": 12,
    "window": 24,
    "window_shifted": 24,
    "vision_transformer": 3,
    "outlook": 20,
}
"""The numbers of tokens of layers that need another one."""


@functools.cache
def of_transformers(name):
    """A module of the layers of a family of Transformers, without kernels."""
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    without_kernels(module)
    return module


def llama(family="Llama", layer=0):
    import transformers

    config = getattr(transformers, f"{family}Config")(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        attn_implementation="eager",
    )
    peer = of_transformers(family.lower())
    layer = getattr(peer, f"{family}Attention")(config, layer_idx=layer)
    rotary = getattr(peer, f"{family}RotaryEmbedding")(config)
    angles = rotary(torch.zeros(BATCH, TIME, 32), torch.arange(TIME)[None])
    return 32, layer, lambda x: layer(x, angles, causal_mask())[0]


def qwen3_next():
    from transformers import Qwen3NextConfig

    config = Qwen3NextConfig(
        hidden_size=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=6,
        num_hidden_layers=4,
        rms_norm_eps=1e-5,
    )
    layer = of_transformers("qwen3_next").Qwen3NextGatedDeltaNet(config, layer_idx=0)
    return 32, layer, layer


def mamba2():
    from transformers import Mamba2Config

    config = Mamba2Config(
        hidden_size=16,
        expand=2,
        head_dim=8,
        num_heads=4,
        n_groups=2,
        state_size=6,
        chunk_size=4,
        num_hidden_layers=1,
    )
    layer = of_transformers("mamba2").Mamba2Mixer(config, layer_idx=0)
    return 16, layer, layer


def xlstm():
    from transformers import xLSTMConfig

    config = xLSTMConfig(
        hidden_size=32,
        num_heads=4,
        qk_dim_factor=0.5,
        v_dim_factor=1.0,
        chunkwise_kernel="chunkwise--native_autograd",
        sequence_kernel="native_sequence__native",
        step_kernel="native",
    )
    layer = of_transformers("xlstm").xLSTMLayer(config)
    return 32, layer, layer


def nystromformer():
    """A layer of Nyströmformer with the map of its output, and its call."""
    from transformers import NystromformerConfig

    config = NystromformerConfig(
        hidden_size=32,
        num_attention_heads=4,
        num_landmarks=3,
        segment_means_seq_len=TIMES["nystromformer"],
        conv_kernel_size=5,
    )
    attention = of_transformers("nystromformer").NystromformerSelfAttention(config)
    layer = torch.nn.ModuleDict({"self": attention, "dense": torch.nn.Linear(32, 32)})
    return 32, layer, lambda x: layer["dense"](layer["self"](x)[0])


def of_timm(family, kind, *grid, **options):
    """A layer of timm of four heads, and its call with x on a grid."""
    layer = getattr(importlib.import_module(f"timm.models.{family}"), kind)(
        32, num_heads=4, **options
    )
    layer.fused_attn = False
    if not grid:
        return 32, layer, layer
    return 32, layer, lambda x: layer(x.reshape(BATCH, *grid, 32)).reshape(x.shape)


def window(shift=0):
    """Window attention of timm, and its call with the windows around it."""
    from timm.models.swin_transformer import SwinTransformerBlock

    block = SwinTransformerBlock(
        32, input_resolution=(4, 6), num_heads=4, window_size=(2, 3), shift_size=shift
    )
    return 32, block.attn, lambda x: block._attn(x.reshape(BATCH, 4, 6, 32)).reshape(x.shape)


def vision_transformer():
    """A vision transformer of timm, and its call with images as rows of pixels."""
    from timm.models.vision_transformer import VisionTransformer

    model = VisionTransformer(
        img_size=(6, 8),
        patch_size=2,
        embed_dim=16,
        depth=2,
        num_heads=4,
        mlp_ratio=1.5,
        num_classes=144,
    )
    return 48, model, lambda x: model(x.reshape(BATCH, 3, 6, 8)).reshape(x.shape)


MODULES = {
    "llama": llama,
    "diffllama": functools.partial(llama, "DiffLlama", 1),
    "qwen3_next": qwen3_next,
    "mamba2": mamba2,
    "nystromformer": nystromformer,
    "xca": functools.partial(of_timm, "xcit", "XCA", qkv_bias=True),
    "vit_attention": functools.partial(of_timm, "vision_transformer", "Attention", qkv_bias=True),
    "window": window,
    "window_shifted": functools.partial(window, (1, 2)),
    "vision_transformer": vision_transformer,
    "xlstm": xlstm,
    "outlook": functools.partial(
        of_timm, "volo", "OutlookAttention", 5, 4, stride=2, qkv_bias=True
    ),
    "channel": functools.partial(of_timm, "davit", "ChannelAttention", qkv_bias=True),
    "channel_by_tokens": functools.partial(of_timm, "davit", "ChannelAttentionV2"),
}
"""Modules of Transformers and timm. The other layers are functions of `fla_layers`."""

SEEDS = (0, 1, 2, 3, 10, 11, 13, 14, 15, 16, 24, 27, 28, 29)
"""Those of `MODULES`, and those of `fla_layers.SHAPES` below, with which the files were made."""
OF_FUNCTIONS = (4, 5, 6, 17, 18, 19, 23, 25, 24, 22, 21, 20, 7, 8, 9)


def without_kernels(module):
    """Let a module call its own PyTorch functions, where a wrapper would prefer kernels."""
    for name, function in list(vars(module).items()):
        if inspect.isfunction(function) and hasattr(function, "__wrapped__"):
            setattr(module, name, inspect.unwrap(function))


def causal_mask():
    return torch.full((1, 1, TIME, TIME), -torch.inf).triu(1)


def drawn(rng, name, shape):
    """Random weights: gains near 1, and matrices that keep the size of x."""
    values = rng.normal(size=shape)
    if len(shape) == 1:
        return 0.3 * values + float("norm" in name)
    return values * 1.3 * np.prod(shape[1:]) ** -0.5


def of_module(name, rng):
    """A layer of Transformers or timm: its width, its parameters and its call."""
    width, layer, call = MODULES[name]()
    with torch.no_grad():
        for own, parameter in layer.eval().named_parameters():
            parameter.copy_(torch.tensor(drawn(rng, own, parameter.shape)))
    return width, dict(layer.named_parameters()), call


def of_function(name, rng):
    """A layer of `fla_layers`: its width, its parameters and its call."""
    import fla_layers

    parameters = {
        own: torch.tensor(drawn(rng, own, shape), dtype=torch.float32, requires_grad=True)
        for own, shape in fla_layers.SHAPES[name].items()
    }
    return 32, parameters, functools.partial(getattr(fla_layers, name), parameters)


def entries(width, parameters, call, rng, time):
    """The entries of one layer, without `versions`."""
    x, cotangent = np.round(16 * rng.normal(size=(2, BATCH, time, width))) / 16
    x = torch.tensor(x, dtype=torch.float32, requires_grad=True)
    out = call(x)
    out = out[0] if isinstance(out, tuple) else out
    (out * torch.tensor(cotangent)).sum().backward()
    arrays = {"x": x.detach(), "out": out.detach(), "cotangent": cotangent, "grad_x": x.grad}
    for name, parameter in parameters.items():
        arrays |= {f"weight.{name}": parameter.detach(), f"grad.{name}": parameter.grad}
    return {name: np.asarray(array, np.float32) for name, array in arrays.items()}


def main(names):
    """Write the results of these layers, or of all."""
    import fla_layers

    torch.set_num_threads(1)
    packages = ("torch", "transformers", "timm", "fla-core")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    with np.load(RESULTS) as saved:
        results = dict(saved)
    seeds = zip((*MODULES, *fla_layers.SHAPES), (*SEEDS, *OF_FUNCTIONS), strict=True)
    for name, seed in seeds:
        if names and name not in names:
            continue
        rng = np.random.default_rng(20270 + seed)
        of = of_module if name in MODULES else of_function
        arrays = entries(*of(name, rng), rng, TIMES.get(name, TIME))
        arrays["versions"] = versions
        results |= {f"{name}/{entry}": array for entry, array in arrays.items()}
    np.savez_compressed(RESULTS, **results)


if __name__ == "__main__":
    main(sys.argv[1:])
