"""The judgements of flash-linear-attention."""

from __future__ import annotations

from precondattn_conformance.ecosystem.judgement import DEFECT, LIMIT, Judgement
from precondattn_conformance.peers.fla import OF_AN_OUTPUT

JUDGEMENTS: tuple[Judgement, ...] = (
    Judgement(
        "fla/kda_chunk fla/gdn2_chunk",
        ("gradients",),
        DEFECT,
        "Gradients of `naive_chunk_kda` and `naive_chunk_gdn2` are NaN where the gates of a chunk "
        "sum to less than −88: the decay between a token and a later one is e to a positive "
        "power, which overflows, and is masked afterwards. Their outputs are right.",
        code="""\
import torch
from torch.nn.functional import normalize

import precondattn as pa
from fla.ops.gdn2.naive import naive_chunk_gdn2
from fla.ops.kda.naive import naive_chunk_kda

torch.manual_seed(0)
q, k, v = normalize(torch.randn(3, 1, 64, 1, 8), dim=-1)
g, beta, one = torch.full((1, 64, 1, 8), -2.0), torch.ones(1, 64, 1), torch.ones(1, 64, 1, 8)

kda, gdn2, expected = q.clone(), q.clone(), q.double()
for each in (kda, gdn2, expected):
    each.requires_grad_()
naive_chunk_kda(kda, k, v, g, beta)[0].sum().backward()
naive_chunk_gdn2(gdn2, k, v, g, one, one)[0].sum().backward()  # with b = w = 1, it is KDA
pa.kda(expected, k.double(), v.double(), g=g.double(), beta=beta.double()).sum().backward()
print("gradient of q, naive_chunk_kda: ", kda.grad[0, 0, 0, :2].tolist())
print("gradient of q, naive_chunk_gdn2:", gdn2.grad[0, 0, 0, :2].tolist())
print("gradient of q, expected:        ", expected.grad[0, 0, 0, :2].tolist())
""",
    ),
    Judgement(
        "fla/kda_chunk fla/gated_delta_chunk fla/gdn2_chunk fla/comba_chunk "
        "fla/simple_gla_chunk fla/simple_gla_parallel fla/dplr_chunk fla/rwkv6_chunk",
        ("stability",),
        DEFECT,
        "The decay between two tokens is a difference of cumulative sums of gates in float32, so "
        "that after a gate that forgets everything (−10,000), gates near 0 have lost their digits. "
        "It needs gates of thousands; recurrent forms of the same operations are right.",
        code="""\
import torch
from torch.nn.functional import normalize

import precondattn as pa
from fla.ops.comba.naive import naive_chunk_comba
from fla.ops.gated_delta_rule.naive import naive_chunk_gated_delta_rule
from fla.ops.gdn2.naive import naive_chunk_gdn2
from fla.ops.generalized_delta_rule.dplr.naive import dplr_chunkwise, dplr_recurrence
from fla.ops.kda.naive import naive_chunk_kda, naive_recurrent_kda
from fla.ops.rwkv6.chunk_naive import naive_chunk_rwkv6
from fla.ops.simple_gla.naive import naive_chunk_simple_gla, naive_parallel_simple_gla

torch.manual_seed(0)
q, k, v = normalize(torch.randn(3, 1, 64, 1, 8), dim=-1)
g, beta, one, u = torch.full((1, 64, 1), -0.03), torch.ones(1, 64, 1), 0 * k + 1, torch.ones(1, 8)
g[:, 0] = -10_000  # the first token forgets all before it
wide = g[..., None].expand(k.shape).contiguous()  # the same gate in each channel
first = [x.transpose(1, 2) for x in (q, k, v, 0 * k, k, wide)]  # heads first; α = 0


def show(function, out, mechanism, **inputs):
    exact = {name: x.double() for name, x in dict(q=q, k=k, v=v, **inputs).items()}
    expected = pa.parse(mechanism)(**exact)
    print(f"{function.__name__}: {(out - expected).abs().max() / expected.abs().max():.1e}")


for f in (naive_recurrent_kda, naive_chunk_kda):
    show(f, f(q, k, v, wide, beta)[0], "kda", g=wide, beta=beta)
f = naive_chunk_gated_delta_rule
show(f, f(q, k, v, g, beta)[0], "gated_delta", g=g, beta=beta)
f = naive_chunk_gdn2
show(f, f(q, k, v, wide, one, one)[0], "gdn2", g=wide, b=one, w=one)
f = naive_chunk_comba
show(f, f(q, k, v, k, g, beta)[0], "comba", p=k, g=g, beta=beta)
for f in (naive_chunk_simple_gla, naive_parallel_simple_gla):
    show(f, f(q, k, v, g, scale=1.0)[0], "ssd", g=g)
for f in (dplr_recurrence, dplr_chunkwise):
    show(f, f(*first)[0].transpose(1, 2) * 8**0.5, "ssd", g=g)
f = naive_chunk_rwkv6
out = f(*first[:3], first[5], u).transpose(1, 2)
show(f, out, "rwkv6[scale=1]", g=wide, u=u)
""",
    ),
    Judgement(
        "fla/forgetting_attn fla/attn_parallel_forget fla/path_forget",
        ("stability",),
        DEFECT,
        "What is added to a logit is a difference of cumulative sums of gates in float32: after a "
        "gate that forgets everything (−10,000), gates near 0 have lost their digits.",
        code="""\
import torch

import precondattn as pa
from fla.ops.attn.naive import naive_parallel_attn
from fla.ops.forgetting_attn.naive import naive_forgetting_attn
from fla.ops.path_attn.naive import naive_path_attn

torch.manual_seed(0)
q, k, v = torch.randn(3, 1, 64, 1, 8)
g, zero = torch.full((1, 64, 1), -0.03), torch.zeros(1, 64, 1)
g[:, 0] = -10_000  # the first token forgets all before it

exact = {name: x.double() for name, x in dict(q=q, k=k, v=v, g=g).items()}
expected = pa.parse("softmax[forget=unscaled]")(**exact)
for name, out in {
    "naive_forgetting_attn": naive_forgetting_attn(q, k, v, g),
    "naive_parallel_attn": naive_parallel_attn(q, k, v, g=g)[0],
    # without reflections (beta = 0); its gates are scaled, as logits are
    "naive_path_attn": naive_path_attn(q, k, v, k, zero, g * 8**0.5, 8**-0.5),
    "precondattn": pa.parse("softmax[forget=unscaled]")(q=q, k=k, v=v, g=g),
}.items():
    print(f"{name}: {(out - expected).abs().max() / expected.abs().max():.1e}")
""",
    ),
    Judgement(
        "fla/comba_recurrent",
        (
            *OF_AN_OUTPUT,
            *("caching", "splits", "alternation", "cache_operations", "states"),
            *("purity", "autocast"),
        ),
        DEFECT,
        "`naive_recurrent_comba` reads the state after its decay, where the paper, the chunked "
        "reference and the recurrent kernel read it before: the two references of one operation "
        "disagree.",
        code="""\
import torch

import precondattn as pa
from fla.ops.comba.naive import naive_chunk_comba, naive_recurrent_comba

one = torch.ones(1, 2, 1, 1)  # two tokens
v, g, beta = torch.tensor([1.0, 0.0]).view(1, 2, 1, 1), torch.tensor([[[0.0], [-1.0]]]), one[..., 0]

print("recurrent:", naive_recurrent_comba(one, one, v, one, beta, g)[0].flatten().tolist())
print("chunked:  ", naive_chunk_comba(one, one, v, one, g, beta)[0].flatten().tolist())
q, k, p = 3 * [one.double()]
expected = pa.comba(q, k, v.double(), p=p, g=g.double(), beta=beta.double())
print("expected: ", expected.flatten().tolist())
""",
    ),
    Judgement(
        "fla/mesa_cg",
        OF_AN_OUTPUT,
        LIMIT,
        "A CG solver approximates the matrix inverse, as its comment says. It adds 1e-5 to both "
        "of its divisors, which are as small as |q|², so that short queries have the largest "
        "error.",
        code="""\
import torch

import precondattn as pa
from fla.ops.mesa_net.naive import naive_mesa_net_CG, naive_mesa_net_exact

torch.manual_seed(0)
q, k, v = torch.randn(3, 1, 64, 1, 8) / 8**0.5
g, beta, lam = torch.full((1, 64, 1), -0.1), torch.ones(1, 64, 1), torch.ones(1, 8)

for length in (1.0, 1e-2):
    inputs = dict(q=length * q, k=k, v=v, g=g, lam_mesa=lam)
    expected = pa.mesa(**{name: x.double() for name, x in inputs.items()})
    for function, chunk in ((naive_mesa_net_CG, [64]), (naive_mesa_net_exact, [])):
        out = function(length * q, k, v, g, lam, beta, *chunk)[0]
        error = (out - expected).abs().max() / expected.abs().max()
        print(f"{function.__name__}, |q| about {length:g}: {error:.1e}")
""",
    ),
)
