"""Transformers: the plain PyTorch functions of its models, whatever kernels are installed.

Functions of arrays are called unchanged. Where attention is a module's method, the method is called
on the arrays that its projections would return.
"""

from __future__ import annotations

from functools import partial
from inspect import unwrap
from types import SimpleNamespace

from precondattn.arrays import Array
from precondattn_conformance.peers.arrays import (
    HALF32,
    Foreign,
    equally_wide,
    forget_gate,
    heads_first,
    widened,
)
from precondattn_conformance.peers.project import Project

TRANSFORMERS = Project(
    "transformers",
    "Transformers",
    "https://github.com/huggingface/transformers",
    package="transformers",
)
STATE = ("initial_state", "output_final_state")


def _of_model(model: str, name: str) -> Foreign:
    """A function or class of a model. If kernels replace a function, this is the original one."""
    module = TRANSFORMERS.imported(f"transformers.models.{model}.modeling_{model}")
    return unwrap(getattr(module, name))


# Softmax attention: `eager_attention_forward` of each model with its own version. A version whose
# softmax is always in float32 does not support float64.


def _mask(visible: Array, like: Array, bias: Array | None) -> Array:
    """The mask that Transformers makes: 0, and the lowest number where a key is not visible."""
    import torch

    low = torch.finfo(like.dtype).min
    zero = like.new_zeros(())
    return torch.where(visible, zero if bias is None else bias.clamp(min=low), low)


def _eager(
    model: str,
    q: Array,
    k: Array,
    v: Array,
    visible: Array,
    scale: float | None,
    bias: Array | None,
    sink: Array | None = None,
    **options: Foreign,
) -> Array:
    groups = q.shape[2] // k.shape[2]
    module = SimpleNamespace(num_key_value_groups=groups, training=False, sinks=sink)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    function, mask = _of_model(model, "eager_attention_forward"), _mask(visible, q, bias)
    out: Array = function(module, *heads_first(q, k, v), mask, scaling=scale, **options)[0]
    return out


_arrangement: Foreign

# The function of Llama is that of most models: 169 files contain it word for word. A sink is an
# additional key with a logit and no value, or it scales the output of plain attention (Granite).
for _model, _mechanism, _takes, _arrangement in (
    ("llama", "softmax", "bias?", {"dtypes": HALF32}),
    ("bert", "softmax", "bias?", {"heads": "equal"}),
    ("gpt2", "softmax", "bias?", {"heads": "equal"}),
    ("gemma2", "softmax", "bias? softcap=", {"dtypes": HALF32}),
    ("gpt_oss", "softmax[sink=true]", "bias? sink", {}),
    ("mimo_v2_flash", "softmax", "bias? sink?", {}),
    ("granite_swa", "softmax[sink=true]", "bias? sink", {"dtypes": HALF32}),
):
    _load, _takes = partial(partial, _eager, _model), f"q k v visible scale {_takes}"
    TRANSFORMERS.direct(f"{_model}_eager", _mechanism, _load, _takes, **_arrangement)


@TRANSFORMERS.peer("softmax", heads="equal")
def longt5_eager(
    q: Array, k: Array, v: Array, visible: Array, scale: float | None, bias: Array | None = None
) -> Array:
    """Takes a bias besides the mask."""
    return _eager("longt5", q, k, v, visible, scale, None, position_bias=bias)


@TRANSFORMERS.peer("softmax")
def sdpa_attention(
    q: Array, k: Array, v: Array, visible: Array, scale: float | None, bias: Array | None = None
) -> Array:
    """The function that its models call for `attn_implementation="sdpa"`."""
    function = TRANSFORMERS.imported(
        "transformers.integrations.sdpa_attention"
    ).sdpa_attention_forward
    module = SimpleNamespace(num_key_value_groups=q.shape[2] // k.shape[2])
    mask = visible.expand(-1, -1, q.shape[1], k.shape[1])
    options = {"scaling": scale, "position_bias": bias}
    out: Array = function(module, *heads_first(q, k, v), mask, **options)[0]
    return out


@TRANSFORMERS.peer("differential", dtypes=HALF32)
def diffllama(
    q: Array, k: Array, v: Array, q2: Array, k2: Array, lam: Array, visible: Array
) -> Array:
    """The heads of the second map come after those of the first; λ is a difference of parameters.

    It takes values twice as wide as queries.
    """
    import torch

    (b, t, h, d), n, e = q.shape, k.shape[2], v.shape[-1]
    width = max(d, -(-e // 2))
    q, k, q2, k2 = (widened(x, width) for x in (q, k, q2, k2))
    v = widened(v, 2 * width)
    one, zero = torch.ones(1, dtype=lam.dtype), torch.zeros((), dtype=q.dtype)
    above, below = torch.log(1 + lam.clamp(min=0)), torch.log(1 + (-lam).clamp(min=0))
    module = SimpleNamespace(
        head_dim=width,
        num_key_value_groups=h // n,
        scaling=d**-0.5,
        training=False,
        config=SimpleNamespace(_attn_implementation="eager"),
        q_proj=lambda _: torch.cat([q, q2], 2),
        k_proj=lambda _: torch.cat([k, k2], 2),
        v_proj=lambda _: torch.cat([v[..., :width], v[..., width:]], 2),
        o_proj=lambda x: x,
        groupnorm=lambda x: x,
        lambda_init=0.0,
        lambda_q1=above[None],
        lambda_q2=below[None],
        lambda_k1=one,
        lambda_k2=one,
    )
    forward = _of_model("diffllama", "DiffLlamaAttention").forward
    rotation = 1 + zero.expand(b, t, width), zero.expand(b, t, width)
    out: Array = forward(module, q.flatten(2), rotation, _mask(visible, q, None))[0]
    return out.unflatten(2, (h, 2 * width))[..., :e]


# Recurrences. The functions of Qwen3-Next are copied word for word in four other models, and the
# chunked one of Kimi Linear in two.

_OF_QWEN = partial(_of_model, "qwen3_next")
_OF_KIMI = partial(_of_model, "kimi_linear")
for _name, _mechanism, _load, _takes, _arrangement in (
    ("gated_delta_chunk", "gated_delta", partial(_OF_QWEN, "torch_chunk_gated_delta_rule"),
     "q k v g beta **state", {"state": STATE}),
    ("gated_delta_recurrent", "gated_delta",
     partial(_OF_QWEN, "torch_recurrent_gated_delta_rule"), "q k v g beta **state",
     {"state": STATE}),
    ("kda_chunk", "kda", partial(_OF_KIMI, "chunk_kimi_delta_attention"), "q k v g beta **state",
     {"heads": "equal", "state": STATE}),
    ("kda_recurrent", "kda", partial(_OF_KIMI, "recurrent_kimi_delta_attention"),
     "q k v g beta initial_state? output_final_state?", {"heads": "equal"}),
):  # fmt: skip
    TRANSFORMERS.direct(_name, _mechanism, _load, _takes, dtypes=HALF32, **_arrangement)


@TRANSFORMERS.peer("ssd", dtypes=HALF32)
def mamba2_chunk_scan(
    q: Array, k: Array, v: Array, g: Array, initial_state: Array | None = None
) -> object:
    """The function of Mamba-2, copied word for word in five other models. Its state has the values'
    axis first."""
    import torch

    state = None if initial_state is None else initial_state.transpose(2, 3)
    out, last = _of_model("mamba2", "mamba2_chunk_scan")(
        v, torch.ones_like(g), g, k, q, 64, initial_states=state, return_final_states=True
    )
    return out.to(v.dtype), last.transpose(2, 3)


@TRANSFORMERS.peer("ssd", dtypes=HALF32, gradient=False)
def mamba2_step(
    q: Array, k: Array, v: Array, g: Array, initial_state: Array | None = None
) -> object:
    """Mamba-2's state update in decoding, token by token. It writes the state in place."""
    import torch

    (b, t, u, e), d = v.shape, k.shape[-1]
    shape = b, u, d, e
    state = torch.zeros(shape) if initial_state is None else initial_state
    state = state.transpose(2, 3).clone()
    function, outs = _of_model("mamba2", "mamba2_selective_state_update"), []
    for i in range(t):
        decay = g[:, i, :, None, None]
        outs.append(function(state, v[:, i], torch.ones_like(v[:, i]), decay, k[:, i], q[:, i]))
    return torch.stack(outs, 1), state.transpose(2, 3)


@TRANSFORMERS.peer("retention[scale=1]", heads="equal", widths="equal")
def minimax_lightning(q: Array, k: Array, v: Array, initial_state: Array | None = None) -> object:
    """MiniMax's attention with RetNet's decays instead of its own, without its gate and norm.

    It keeps its state in the dtype of the values.
    """
    import torch

    h, width = q.shape[2:]
    attention = _of_model("minimax", "MiniMaxLightningAttention")
    exponents = -5.0 - torch.arange(h, dtype=torch.float64)
    slopes = -torch.log1p(-torch.exp2(exponents)).to(q.device)[:, None, None]
    module = SimpleNamespace(block_size=64, num_attention_heads=h, head_dim=width, layer_idx=0)
    factors = attention.decay_factors(module, slopes)
    module.query_decay, module.key_decay, module.diagonal_decay = (x.to(q.dtype) for x in factors)
    module.slope_rate = slopes.to(q.dtype)
    module.qkv_proj = lambda _: torch.cat([q, k, v], 3).flatten(2)
    module.act_fn = module.norm = module.out_proj = lambda x: x
    module.output_gate = lambda x: x.new_full((), torch.inf)
    states = [None if initial_state is None else initial_state.to(v.dtype)]
    cache = SimpleNamespace(
        get_linear_cache=lambda layer: states[-1],
        set_linear_cache=lambda layer, state: states.append(state),
    )
    out, _ = attention.forward(module, q.flatten(2), None, None, cache)
    return out.unflatten(2, (h, width)), states[-1]


# mLSTM. The running maximum begins at 0 here, and at −∞ in the definition. That changes the scale
# of ε, which is visible in float64.


def _mlstm(function: str, q: Array, k: Array, v: Array, g: Array, i: Array, eps: float) -> object:
    """Takes gates in the dtype of the queries, contiguous in memory, if it is in chunks."""
    f = forget_gate(g)
    if "chunk" in function:
        i, f = (x.to(q.dtype).contiguous() for x in (i, f))
    return _of_model("xlstm", function)(q, k, v, i, f, eps=eps)


for _name, _function, _multiple in (
    ("xlstm_chunk", "mlstm_chunkwise_native_autograd", 64),
    ("xlstm_recurrent", "mlstm_recurrent_sequence_native", 1),
):
    _load, _takes = partial(partial, _mlstm, _function), "q k v g i eps"
    _arrangement = {"layout": "bhtd", "heads": "equal", "multiple": _multiple, "dtypes": HALF32}
    TRANSFORMERS.direct(_name, "mlstm", _load, _takes, **_arrangement)


@TRANSFORMERS.peer("nystrom[landmarks=8,start=batch]", heads="equal")
def nystromformer(q: Array, k: Array, v: Array, landmarks: int) -> Array:
    """Nyströmformer without its projections and its convolution. It scales queries and keys by
    d^(-1/4)."""
    (_, t, h, d), e = q.shape, v.shape[-1]
    q, k, v = equally_wide(q, k, v)
    width = q.shape[-1]
    q, k = ((width / d) ** 0.25 * x for x in (q, k)) if width != d else (q, k)
    attention = _of_model("nystromformer", "NystromformerSelfAttention")
    module = SimpleNamespace(
        num_attention_heads=h,
        attention_head_size=width,
        all_head_size=h * width,
        num_landmarks=landmarks,
        seq_len=t,
        conv_kernel_size=None,
        init_option="original",
        query=lambda _: q.flatten(2),
        key=lambda _: k.flatten(2),
        value=lambda _: v.flatten(2),
    )
    module.iterative_inv = partial(attention.iterative_inv, module)
    out: Array = attention.forward(module, q.flatten(2))[0].unflatten(2, (h, width))
    return out[..., :e]
