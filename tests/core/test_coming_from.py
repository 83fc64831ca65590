"""Every row of the page *Coming from another library*: both sides compute the same.

Packages that are not installed, and kernels that need a GPU, are replaced by their definitions.
With `TRITON_INTERPRET=1` those of flash-linear-attention that the interpreter runs are themselves.
"""

import math
import os
import re
from copy import deepcopy
from functools import partial
from importlib.util import find_spec
from inspect import unwrap
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

PAGE = (Path(__file__).parents[2] / "docs" / "coming_from.md").read_text(encoding="utf-8")
_, *PARTS = re.split(r"^## (.*)\n", PAGE, flags=re.MULTILINE)
SECTIONS = dict(zip(PARTS[::2], PARTS[1::2], strict=True))
ROW = re.compile(r"^\| `([^`]*)` \| `([^`]*)` \|$", re.MULTILINE)
HEADS_FIRST = {"PyTorch's SDPA", "FlexAttention", "Transformers", "x-transformers"}
RETURNS_TIME_FIRST = re.compile("ALL_ATTENTION_FUNCTIONS|eager_attention_forward|^model|^Llama")


def swapped(array):
    return array.transpose(1, 2)


def definition(
    q, k, v, causal=False, bias=0.0, scale=None, softcap=None, window=None, sink=None
):  # fmt: skip
    """Attention of (b, t, h, d), and its log-sum-exp (b, h, t).

    `window` has the numbers of tokens before and after, of which -1 is all.
    """
    q, k, v = (swapped(x) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q.shape[-1] ** -0.5 if scale is None else scale) * q @ k.mT
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    t, s = scores.shape[-2:]
    ahead = torch.arange(s) - torch.arange(t)[:, None] - (s - t)
    before, after = (-1, -1) if window is None else window
    hidden = (ahead > 0) & causal
    hidden |= (-ahead > before) & (before >= 0)
    hidden |= (ahead > after) & (after >= 0)
    scores = (scores + bias).masked_fill(hidden, -torch.inf)
    if sink is not None:
        column = sink[:, None, None].expand(*scores.shape[:2], t, 1)
        scores, v = torch.cat([scores, column], -1), torch.nn.functional.pad(v, (0, 0, 0, 1))
    return swapped(scores.softmax(-1) @ v), scores.logsumexp(-1)


def of_pytorch():
    from torch.nn.attention.bias import causal_lower_right

    sdpa = torch.nn.functional.scaled_dot_product_attention
    return {"sdpa": sdpa, "causal_lower_right": causal_lower_right}


def of_flex_attention():
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    def block(mask):
        return create_block_mask(mask, 2, None, 10, 10, device="cpu")

    return {"AuxRequest": AuxRequest, "block": block, "flex_attention": flex_attention}


def mask_of(lengths=None, before=math.inf, after=0, bias=0.0):
    """A mask of xformers: packed sequences, the tokens before and after, and what scores get."""

    def materialize(shape, dtype):
        t, s = shape[-2:]
        ahead = torch.arange(s) - torch.arange(t)[:, None] - (s - t)
        visible = (ahead <= after) & (-ahead <= before)
        if lengths is not None:
            of = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
            visible &= of[:, None] == of
        return (torch.zeros(shape, dtype=dtype) + bias).masked_fill(~visible, -torch.inf)

    return SimpleNamespace(
        materialize=materialize,
        make_causal=lambda: mask_of(lengths),
        make_local_attention=lambda size: mask_of(lengths, before=size - 1),
    )


def of_xformers():
    def attention(q, k, v, attn_bias=0.0, scale=None):
        if hasattr(attn_bias, "materialize"):
            shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
            attn_bias = attn_bias.materialize(shape, dtype=q.dtype)
        out, _ = definition(*(x.flatten(2, -2) for x in (q, k, v)), bias=attn_bias, scale=scale)
        return out.reshape(q.shape)

    masks = {
        "LowerTriangularMask": mask_of,
        "LowerTriangularMaskWithTensorBias": lambda bias: mask_of(bias=bias),
        "LowerTriangularFromBottomRightMask": mask_of,
        "LocalAttentionFromBottomRightMask": lambda window_left, window_right: mask_of(
            before=window_left, after=window_right
        ),
        "BlockDiagonalMask": SimpleNamespace(from_seqlens=partial(mask_of, after=math.inf)),
        "BlockDiagonalCausalMask": SimpleNamespace(from_seqlens=mask_of),
    }
    if find_spec("xformers"):
        from xformers.ops.fmha import attn_bias

        masks = {name: getattr(attn_bias, name) for name in masks}
    return {"attention": attention, **masks}


def of_flash_attention():
    names = {"softmax_scale": "scale", "window_size": "window", "s_aux": "sink"}

    def attention(q, k, v, alibi_slopes=None, return_attn_probs=False, **options):
        options = {names.get(name, name): value for name, value in options.items()}
        if alibi_slopes is not None:
            distance = torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])
            options["bias"] = -alibi_slopes[:, None, None] * distance.abs()
        out, lse = definition(q, k, v, **options)
        return (out, lse, None) if return_attn_probs else out

    def packed(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        return_softmax_lse=False, **options,
    ):  # fmt: skip
        parts = []
        for (i, j), (m, n) in zip(pairwise(cu_seqlens_q), pairwise(cu_seqlens_k), strict=True):
            assert (j - i <= max_seqlen_q, n - m <= max_seqlen_k) == (True, True)
            part = (q[None, i:j], k[None, m:n], v[None, m:n])
            parts.append(attention(*part, return_attn_probs=True, **options))
        out, lse = torch.cat([out[0] for out, *_ in parts]), [lse[0] for _, lse, _ in parts]
        return (out, torch.cat(lse, dim=1)) if return_softmax_lse else out

    def cached(q, k_cache, v_cache, k, v, cache_seqlens, **options):
        k, v = (
            torch.cat([old[:, :cache_seqlens], new], 1) for old, new in ((k_cache, k), (v_cache, v))
        )
        return attention(q, k, v, **options)

    return {
        "flash_attn_func": attention,
        "flash_attn_qkvpacked_func": lambda qkv, **options: attention(*qkv.unbind(2), **options),
        "flash_attn_varlen_func": packed,
        "flash_attn_with_kvcache": cached,
    }


def recurrence(q, k, v, g, beta=None, scale=None, initial_state=None, output_final_state=False):
    """The delta rule, or with no `beta` a sum, on a state S (b, h, d, e) that decays by g."""
    b, t, h, d = q.shape
    state = torch.zeros(b, h, d, v.shape[-1]) if initial_state is None else initial_state
    rows = []
    for i in range(t):
        decay = g[:, i].exp()
        state = state * (decay if decay.ndim == 3 else decay[..., None])[..., None]
        written = v[:, i]
        if beta is not None:
            known = torch.einsum("bhde,bhd->bhe", state, k[:, i])
            written = beta[:, i, :, None] * (written - known)
        state = state + torch.einsum("bhd,bhe->bhde", k[:, i], written)
        rows.append(torch.einsum("bhde,bhd->bhe", state, q[:, i]))
    out = (d**-0.5 if scale is None else scale) * torch.stack(rows, dim=1)
    return out, state if output_final_state else None


def of_fla():
    delta, kda, gla = (recurrence,) * 3
    if find_spec("fla"):
        from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule as delta
        from fla.ops.gla.naive import naive_recurrent_gla as gla
        from fla.ops.kda.naive import naive_recurrent_kda as kda
    recurrent_delta, recurrent_kda, of_transformers = delta, kda, recurrence
    if find_spec("fla") and os.environ.get("TRITON_INTERPRET") == "1":
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule as recurrent_delta
        from fla.ops.kda import fused_recurrent_kda as recurrent_kda
    if find_spec("transformers"):
        from transformers.models.qwen3_next import modeling_qwen3_next

        # Its own code, also where Transformers would call that of flash-linear-attention.
        of_transformers = in_float32(unwrap(modeling_qwen3_next.torch_chunk_gated_delta_rule))
    narrow = in_float32 if find_spec("fla") else (lambda function: function)
    return {
        "chunk_gated_delta_rule": keywords_of_fla(narrow(delta)),
        "chunk_kda": keywords_of_fla(narrow(kda)),
        "chunk_gla": narrow(gla),
        "fused_recurrent_gated_delta_rule": narrow(recurrent_delta),
        "fused_recurrent_kda": narrow(recurrent_kda),
        "torch_chunk_gated_delta_rule": of_transformers,
    }


def in_float32(function):
    """A function that computes in float32, with arrays of that dtype."""

    def narrow(value):
        return value.float() if isinstance(value, torch.Tensor) else value

    def call(*arrays, **options):
        options = {name: narrow(value) for name, value in options.items()}
        return function(*map(narrow, arrays), **options)

    return call


def keywords_of_fla(naive):
    """A naive function with what only the others of flash-linear-attention take."""

    def chunk(
        q, k, v, g, beta, use_qk_l2norm_in_kernel=False, cu_seqlens=None, initial_state=None,
        **options,
    ):  # fmt: skip
        if use_qk_l2norm_in_kernel:
            q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        inputs = {"q": q, "k": k, "v": v, "beta": beta, "g": g}
        if cu_seqlens is None:
            return naive(**inputs, initial_state=initial_state, **options)
        outs, states = [], []
        for n, (i, j) in enumerate(pairwise(cu_seqlens)):
            start = None if initial_state is None else initial_state[n : n + 1]
            part = {name: x[:, i:j] for name, x in inputs.items()}
            out, state = naive(**part, initial_state=start, **options)
            outs.append(out)
            states.append(state)
        return torch.cat(outs, dim=1), None if states[0] is None else torch.cat(states)

    return chunk


def of_transformers(folder):
    pytest.importorskip("transformers")
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache, T5Config
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.gemma2 import modeling_gemma2
    from transformers.models.gpt_oss import modeling_gpt_oss
    from transformers.models.llama import modeling_llama
    from transformers.models.t5.modeling_t5 import T5Attention

    from precondattn.integrations.transformers import replace_attention, static_cache

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    t5 = T5Attention(T5Config(num_heads=4), has_relative_attention_bias=True).double()
    torch.nn.init.normal_(t5.relative_attention_bias.weight)
    sinks = torch.randn(4, dtype=torch.float64)
    module = SimpleNamespace(is_causal=True, num_key_value_groups=1, training=False, sinks=sinks)
    of_models = {"model": model, "ours": replace_attention(deepcopy(model), "softmax"), "t5": t5}
    given = (LlamaForCausalLM, StaticCache, replace_attention, static_cache)
    return {
        **{each.__name__: each for each in given},
        **{"gemma2": modeling_gemma2, "gpt_oss": modeling_gpt_oss, "llama": modeling_llama},
        **{"ALL_ATTENTION_FUNCTIONS": ALL_ATTENTION_FUNCTIONS, "folder": folder, "module": module},
        "padding": torch.tensor([[0, 1, 1], [1, 1, 1]]),
        "tokens": torch.tensor([[3, 4, 5], [6, 7, 8]]),
        **of_models,
        **of_pytorch(),
    }


def of_x_transformers():
    if find_spec("x_transformers"):
        from x_transformers.attend import Attend

        return {"Attend": Attend}

    def attend(logit_softclamp_value=None, softclamp_logits=False, **options):
        softcap = logit_softclamp_value if softclamp_logits else None

        def attention(q, k, v):
            times = q.shape[1] // k.shape[1]  # Query head i reads key head i modulo their number.
            inputs = (swapped(x) for x in (q, k.repeat(1, times, 1, 1), v.repeat(1, times, 1, 1)))
            return swapped(definition(*inputs, softcap=softcap, **options)[0]), None

        return attention

    return {"Attend": attend}


THERE = {
    "PyTorch's SDPA": of_pytorch,
    "FlexAttention": of_flex_attention,
    "xformers": of_xformers,
    "flash-attention and vLLM": of_flash_attention,
    "flash-linear-attention": of_fla,
    "Transformers": of_transformers,
    "JAX": lambda: {"jax": pytest.importorskip("jax")},
    "x-transformers": of_x_transformers,
}


def test_every_row_of_a_table_is_code():
    tables = {name: len(re.findall(r"^\| ", text, re.MULTILINE)) for name, text in SECTIONS.items()}
    rows = {name: len(ROW.findall(text)) for name, text in SECTIONS.items()}
    assert {name: n + 1 for name, n in rows.items() if n} == {n: c for n, c in tables.items() if c}
    assert {name for name, n in rows.items() if n} == {*THERE}


def as_jax(value):
    """A tensor as an array of JAX, whose attention computes in float32; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    narrow = value.float() if value.is_floating_point() else value
    return pytest.importorskip("jax").numpy.asarray(narrow.numpy())


def as_tensor(array):
    return array if isinstance(array, torch.Tensor) else torch.from_numpy(np.array(array))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:Triton is not supported on current platform")
@pytest.mark.filterwarnings("ignore:Flash Attention is not installed")
@pytest.mark.thorough(
    but=("PyTorch's SDPA", "xformers", "flash-attention and vLLM", "JAX", "x-transformers")
)
@pytest.mark.parametrize("section", THERE)
def test_both_sides_of_each_row_compute_the_same(section, tmp_path):
    here = {}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        exec(block, here)
    here["k_cache"], here["v_cache"] = (
        torch.nn.functional.pad(here[name][:, :9], (0, 0, 0, 0, 0, 7)) for name in "kv"
    )
    others = THERE[section](tmp_path) if section == "Transformers" else THERE[section]()
    if section == "JAX":
        here = {name: as_jax(value) for name, value in here.items()}
    here = {**others, **here}
    there = {**here, **others}
    heads_first = section in HEADS_FIRST
    if heads_first:
        there |= {name: swapped(here[name]) for name in ("q", "k", "v", "k2", "v2")}
    for text, ours in ROW.findall(SECTIONS[section]):
        expected, found = (
            as_tensor(eval(code.replace(r"\|", "|"), names))
            for code, names in ((text, there), (ours, here))
        )
        if heads_first and not RETURNS_TIME_FIRST.search(text):
            expected = swapped(expected)
        torch.testing.assert_close(
            found.to(expected.dtype), expected, msg=lambda message, row=text: f"{row}: {message}"
        )
