"""xLSTM: the three forms of its mLSTM in plain PyTorch."""

from __future__ import annotations

from types import ModuleType

from precondattn.arrays import Array
from precondattn_conformance.peers.arrays import equally_wide_by_default
from precondattn_conformance.peers.mlstm_kernels import before_sigmoid
from precondattn_conformance.peers.project import on_github

XLSTM = on_github("NX-AI/xlstm@032a6fb8ee19a8c0db80ae6111ff4744a09414a9", "2025-11-04", "xLSTM")
ALL = (XLSTM,)

CHUNK = 64


def _backends() -> ModuleType:
    return XLSTM.imported("xlstm/blocks/mlstm/backends.py")


@XLSTM.peer("mlstm", library="torch", layout="bhtd", heads="equal")
def parallel_stabilized_simple(
    q: Array, k: Array, v: Array, g: Array, i: Array, eps: float
) -> Array:
    run = _backends().parallel_stabilized_simple
    return run(q, k, v, i[..., None], before_sigmoid(g)[..., None], eps=eps)


@XLSTM.peer("mlstm[eps=0]", library="torch", layout="bhtd", heads="equal")
def recurrent_step_stabilized_simple(q: Array, k: Array, v: Array, g: Array, i: Array) -> Array:
    """Computes one token after the other, from a running maximum of 0. It squeezes its inputs in
    place."""
    import torch

    step, f = _backends().recurrent_step_stabilized_simple, before_sigmoid(g)
    b, h, tokens, d = k.shape
    state = (q.new_zeros(b, h, d, v.shape[-1]), q.new_zeros(b, h, d, 1), f.new_zeros(b, h, 1, 1))
    outs = []
    for t in range(tokens):
        q_t, k_t, v_t, i_t, f_t = (x[:, :, t, None].clone() for x in (q, k, v, i, f))
        out, state = step(*state, q_t, k_t, v_t, i_t[..., None], f_t[..., None], eps=0.0)
        outs.append(out)
    return torch.cat(outs, 2).to(q.dtype)


@XLSTM.peer("mlstm[eps=0]", library="torch", layout="bhtd", heads="equal", multiple=CHUNK)
def chunkwise_simple(q: Array, k: Array, v: Array, g: Array, i: Array) -> Array:
    """Computes in chunks, from a running maximum of 0."""
    run, e = _backends().chunkwise_simple, v.shape[-1]
    q, k, v = equally_wide_by_default(q, k, v)
    return run(q, k, v, i, before_sigmoid(g), chunk_size=CHUNK, eps=0.0)[..., :e].to(q.dtype)
