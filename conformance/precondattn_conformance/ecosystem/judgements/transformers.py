"""The judgements of Transformers."""

from __future__ import annotations

from precondattn_conformance.ecosystem.judgement import CONVENTIONAL, DEFECT, LIMIT, Judgement

JUDGEMENTS: tuple[Judgement, ...] = (
    Judgement(
        "transformers/llama_eager transformers/bert_eager transformers/gpt2_eager "
        "transformers/longt5_eager transformers/gemma2_eager transformers/mimo_v2_flash_eager "
        "transformers/diffllama",
        ("outputs", "gradients"),
        CONVENTIONAL,
        "A query that sees no key gets the mean of all values, and not 0: its mask is the lowest "
        "finite number in every place, which softmax does not see.",
        code="""\
from types import SimpleNamespace

import torch

import precondattn as pa
from transformers.models.llama.modeling_llama import eager_attention_forward

q, k, v = torch.ones(1, 1, 1, 1), torch.ones(1, 1, 2, 1), torch.tensor([1.0, 3.0]).view(1, 1, 2, 1)
mask = torch.full((1, 1, 1, 2), torch.finfo(q.dtype).min)  # no key is visible

module = SimpleNamespace(num_key_value_groups=1, training=False)
print("eager:      ", eager_attention_forward(module, q, k, v, mask, scaling=1.0)[0].item())
q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
print("precondattn:", pa.softmax(q, k, v, key_mask=torch.zeros(1, 2, dtype=torch.bool)).item())
""",
    ),
    Judgement(
        "transformers/sdpa_attention",
        ("gradients",),
        DEFECT,
        "A query that sees no key is 0 without a position bias, and the mean of all values with "
        "one: `create_position_bias_mask` writes the lowest finite number where no key is visible, "
        "and its docstring says −∞.",
        code="""\
from types import SimpleNamespace

import torch

from transformers.integrations.sdpa_attention import sdpa_attention_forward

q, k, v = torch.ones(1, 1, 1, 1), torch.ones(1, 1, 2, 1), torch.tensor([1.0, 3.0]).view(1, 1, 2, 1)
mask = torch.zeros(1, 1, 1, 2, dtype=torch.bool)  # no key is visible

for bias in (None, torch.zeros(1, 1, 1, 2)):
    out = sdpa_attention_forward(SimpleNamespace(), q, k, v, mask, position_bias=bias)[0]
    print("without a bias:" if bias is None else "a bias of 0:   ", out.item())
""",
    ),
    Judgement(
        "transformers/kda_chunk transformers/gated_delta_chunk",
        ("stability",),
        DEFECT,
        "The decay between two tokens is a difference of cumulative sums of gates in float32, so "
        "that after a gate that forgets everything (−10,000), gates near 0 have lost their digits. "
        "It needs gates of thousands; the recurrent forms of the same operations are right.",
        code="""\
from inspect import unwrap  # the functions in PyTorch, where kernels are installed too

import torch
from torch.nn.functional import normalize

import precondattn as pa
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3

torch.manual_seed(0)
q, k, v = normalize(torch.randn(3, 1, 64, 1, 8), dim=-1)
g, beta = torch.full((1, 64, 1), -0.03), torch.ones(1, 64, 1)
g[:, 0] = -10_000  # the first token forgets all before it
wide = g[..., None].expand(k.shape).contiguous()  # the same gate in each channel

exact = {name: x.double() for name, x in dict(q=q, k=k, v=v, g=g, beta=beta).items()}
expected = pa.gated_delta(**exact)
options = dict(initial_state=None, output_final_state=False)
for function, gates in [
    (kimi.recurrent_kimi_delta_attention, wide),
    (kimi.chunk_kimi_delta_attention, wide),
    (qwen3.torch_recurrent_gated_delta_rule, g),
    (qwen3.torch_chunk_gated_delta_rule, g),
]:
    error = (unwrap(function)(q, k, v, gates, beta, **options)[0] - expected).abs().max()
    print(f"{function.__name__}: {error / expected.abs().max():.1e}")
""",
    ),
    Judgement(
        "transformers/xlstm_chunk transformers/xlstm_recurrent",
        ("stability",),
        LIMIT,
        "They are for gates that xLSTM has capped (`gate_soft_cap`, 15). At gates of thousands the "
        "running maximum, which adds logarithms of forget gates in float32, loses digits; and "
        "where all gates are below −88, gradients are NaN.",
        code="""\
import torch

import precondattn as pa
from transformers.models.xlstm import modeling_xlstm as xlstm

torch.manual_seed(0)
q, k, v = torch.randn(3, 1, 1, 64, 8)

for input_gate, forget_gate in ((15.0, 3.0), (10_000.0, 3.0), (-100.0, -100.0)):
    print(f"input gates of {input_gate:g}, forget gates of {forget_gate:g}:")
    i, f = torch.full((1, 1, 64), input_gate), torch.full((1, 1, 64), forget_gate)
    exact = {name: x.double().transpose(1, 2) for name, x in dict(q=q, k=k, v=v, i=i).items()}
    g = torch.nn.functional.logsigmoid(f.double()).transpose(1, 2)
    expected = pa.mlstm(**exact, g=g).transpose(1, 2)
    for name in ("mlstm_recurrent_sequence_native", "mlstm_chunkwise_native_autograd"):
        given = i.clone().requires_grad_()
        out = getattr(xlstm, name)(q, k, v, given, f)
        out.sum().backward()
        error = (out - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
        finite = bool(given.grad.isfinite().all())
        print(f"  {name}: {error:.1e}, gradients finite: {finite}")
""",
    ),
)
