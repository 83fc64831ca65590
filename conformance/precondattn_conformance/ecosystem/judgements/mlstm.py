"""The judgements of the mLSTM of xLSTM and of mLSTM kernels."""

from __future__ import annotations

from precondattn_conformance.ecosystem.judgement import DEFECT, LIMIT, Judgement

JUDGEMENTS: tuple[Judgement, ...] = (
    Judgement(
        "xlstm/parallel_stabilized_simple xlstm/recurrent_step_stabilized_simple "
        "xlstm/chunkwise_simple",
        ("stability",),
        DEFECT,
        "Gradients are NaN where m, the largest sum of gates of a token, is below −88 "
        "in float32 (−709 in float64), as after one input gate of −89: the lower bound "
        "e^{−m} of the denominator overflows. Outputs are right.",
        code="""\
import torch

import precondattn as pa
from precondattn_conformance.peers.everyone import peer_named

x = torch.ones(1, 1, 1, 1)  # one token
run = peer_named("xlstm/parallel_stabilized_simple").function
for gate in (-88.0, -89.0):
    gates = torch.tensor([-0.5, gate])[:, None, None, None]
    g, i = (each.clone().requires_grad_() for each in gates)
    g64, i64 = (each.double().requires_grad_() for each in gates)
    run(x, x, x, g, i, 1e-6).sum().backward()
    pa.mlstm(*[x.double()] * 3, g=g64, i=i64).sum().backward()
    print(f"input gate {gate:.0f}: gradient {i.grad.item()}, expected {i64.grad.item():.1e}")
""",
    ),
    Judgement(
        "mlstm_kernels/torch_parallel mlstm_kernels/torch_parallel_stable "
        "mlstm_kernels/torch_chunkwise mlstm_kernels/jax_parallel "
        "mlstm_kernels/jax_chunkwise",
        ("stability",),
        DEFECT,
        "Gradients are NaN where m, the largest sum of gates of a token, is below −88 "
        "in float32 (−709 in float64), as after one input gate of −89: the lower bound "
        "e^{−m} of the denominator overflows. The recurrent form is finite.",
        code="""\
import torch
from mlstm_kernels.torch.parallel import registry
from mlstm_kernels.torch.recurrent.native_sequence import mlstm_recurrent_sequence__native_fw

import precondattn as pa

x = torch.ones(1, 1, 1, 1)  # one token
gate = torch.full((1, 1, 1), -100.0)
i64 = gate.double().requires_grad_()
g = torch.nn.functional.logsigmoid(torch.zeros_like(i64))
pa.mlstm(*[x.double()] * 3, g=g, i=i64).sum().backward()
print(f"expected: gradient of i {i64.grad.item():.1e}")
for name, function in (
    ("native_autograd", registry["native_autograd"]),
    ("native_stablef_autograd", registry["native_stablef_autograd"]),
    ("recurrent", mlstm_recurrent_sequence__native_fw),
):
    i = gate.clone().requires_grad_()
    function(x, x, x, i, torch.zeros_like(gate)).sum().backward()
    print(f"{name}: gradient of i {i.grad.item():.1e}")
""",
    ),
    Judgement(
        "mlstm_kernels/torch_recurrent",
        ("stability",),
        LIMIT,
        "The logarithm of a forget gate is added to the running maximum, which has the dtype of "
        "the states, float32 by default: at input gates of 10⁴, it is rounded to 0.001. With "
        "`dtype_state=torch.float64` it is right; xLSTM's models cap gates at 15.",
        code="""\
import torch
from mlstm_kernels.torch.recurrent.native_sequence import mlstm_recurrent_sequence__native_fw as run

import precondattn as pa

q, k, v = torch.ones(3, 1, 1, 2, 1)
v[:, :, 1] = 0
f = torch.full((1, 1, 2), 4.5)  # a decay of e to the power of -0.011
for gate in (15.0, 9_990.0):
    i = torch.full((1, 1, 2), gate)
    x = {name: each.double().transpose(1, 2) for name, each in dict(q=q, k=k, v=v, i=i).items()}
    g = torch.nn.functional.logsigmoid(f.double()).transpose(1, 2)
    expected = pa.mlstm(**x, g=g, eps=0).transpose(1, 2)
    for dtype in (torch.float32, torch.float64):
        out = run(q, k, v, i, f, eps=0, dtype_state=dtype)
        error = (out - expected).abs().max()
        print(f"input gates of {gate:g}, states in {dtype}: {error:.0e}")
""",
    ),
)
