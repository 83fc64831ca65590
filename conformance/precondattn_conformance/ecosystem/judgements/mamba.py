"""The judgements of Mamba's references."""

from __future__ import annotations

from precondattn_conformance.ecosystem.judgement import DEFECT, Judgement

JUDGEMENTS: tuple[Judgement, ...] = (
    Judgement(
        "mamba/ssd_chunk_refs",
        ("stability", "threads"),
        DEFECT,
        "Gradients of the gates are NaN where those of a chunk sum to less than −88: "
        "`chunk_scan_ref` takes e to the power of differences above the diagonal too, "
        "where they are positive, and masks afterwards. Outputs are right, and no "
        "docstring promises gradients; `segsum` of the same project masks before.",
        code="""\
import torch

import precondattn as pa
from precondattn_conformance.peers.everyone import peer_named

x = torch.ones(1, 64, 1, 1)
run = peer_named("mamba/ssd_chunk_refs").function
for gate in (-1.3, -1.4):
    g = torch.full((1, 64, 1), gate).requires_grad_()
    g64 = g.detach().double().requires_grad_()
    run(x, x, x, g).sum().backward()
    pa.ssd(*[x.double()] * 3, g=g64).sum().backward()
    last = g.grad[0, -1, 0].item(), g64.grad[0, -1, 0].item()
    print(f"64 gates of {gate}: gradient of the last one {last[0]:.5f}, expected {last[1]:.5f}")
""",
    ),
)
