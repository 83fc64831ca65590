"""The functions of flash-linear-attention 0.6.0 that the benchmarks call, without its kernels.

Each takes the original's arguments, makes its assertions, and asserts the shapes that its kernels
assume. The results are computed by this library.
"""

import sys
from types import ModuleType

import torch

import precondattn as pa

WIDTHS_OF_PATH = (16, 32, 64, 128)


def chunk_linear_attn(
    q, k, v, scale=None, initial_state=None, output_final_state=False, normalize=True,
    cu_seqlens=None,
):  # fmt: skip
    _one_number_of_heads(q, k, v)
    return pa.Linear(normalize=normalize)(q, k, v), None


def chunk_retention(
    q, k, v, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, **kwargs
):
    assert not kwargs
    _one_number_of_heads(q, k, v)
    return pa.Retention()(q, k, v), None


def chunk_gla(
    q, k, v, g, scale=None, initial_state=None, output_final_state=False, state_v_first=False,
    cu_seqlens=None, cu_seqlens_cpu=None,
):  # fmt: skip
    assert q.shape == k.shape == g.shape
    assert v.shape == (*q.shape[:3], v.shape[-1])
    return pa.GLA()(q, k, v, g=g), None


def chunk_gsa(
    q, k, v, s, g=None, scale=None, initial_state=None, output_final_state=False,
    checkpoint_level=2, cu_seqlens=None, cu_seqlens_cpu=None, **kwargs,
):  # fmt: skip
    assert not kwargs
    assert s.shape == g.shape == (*k.shape[:3], s.shape[-1])
    assert q.shape[2] % k.shape[2] == 0
    return pa.GSA()(q, k, v, s=s, g=g), [None, None]


def chunk_delta_rule(
    q, k, v, beta, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, cu_seqlens=None, cu_seqlens_cpu=None, **kwargs,
):  # fmt: skip
    assert not kwargs
    assert q.dtype == k.dtype == v.dtype
    assert q.dtype != torch.float32
    _one_number_of_heads(q, k, v)
    assert beta.shape == q.shape[:3]
    return pa.Delta()(q, k, v, beta=beta), None


def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
    state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None,
    cp_context=None, **kwargs,
):  # fmt: skip
    assert not kwargs
    assert q.shape == k.shape
    assert v.shape[2] % q.shape[2] == 0
    assert g.shape == beta.shape == v.shape[:3]
    out = pa.GatedDelta()(q, k, v, g=g, beta=beta)
    if out.requires_grad:
        out.register_hook(lambda gradient: _chunk_bwd_dqkwg())
    return out, None


def chunk_kda(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False, safe_gate=False, lower_bound=None, disable_recompute=False,
    return_intermediate_states=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None,
    cp_context=None, use_graph=False, max_num_seqs=None, **kwargs,
):  # fmt: skip
    assert not kwargs
    assert q.shape == k.shape
    assert q.shape[3] <= 256
    assert v.shape[2] % q.shape[2] == 0
    assert g.shape == (*v.shape[:3], q.shape[3])
    assert beta.shape == v.shape[:3]
    return pa.KDA()(q, k, v, g=g, beta=beta), None


def parallel_path_attn(q, k, v, w, beta, g=None, scale=None, cu_seqlens=None, use_cache=False):
    assert w.dtype == beta.dtype == torch.float32
    assert q.shape[-1] in WIDTHS_OF_PATH
    assert v.shape[-1] in WIDTHS_OF_PATH
    assert q.shape[-1] == k.shape[-1]
    assert k.shape == w.shape
    assert beta.shape[:3] == k.shape[:3]
    assert q.shape[-2] % k.shape[-2] == 0
    return pa.Path()(q, k, v, w=w.to(q.dtype), beta=beta.to(q.dtype)), k


def _one_number_of_heads(q, k, v):
    assert q.shape == k.shape
    assert v.shape[:3] == q.shape[:3]


def _chunk_bwd_dqkwg():
    """Refuse a gradient, as `fla.ops.common.chunk_o` does on Hopper with Triton 3.6."""
    if not sys.modules["fla.ops.common.chunk_o"].TRITON_ABOVE_3_7_1:
        raise RuntimeError("Triton >= 3.4.0 and < 3.7.1 on Hopper GPUs produces incorrect results")


def without_a_driver(*args, **kwargs):
    """Raise the error of a kernel on a CPU."""
    raise RuntimeError("0 active drivers ([]). There should only be one.")


MODULES = {
    "fla": {},
    "fla.utils": {"TRITON_ABOVE_3_7_1": False},
    "fla.ops": {},
    "fla.ops.common": {},
    "fla.ops.common.chunk_o": {"TRITON_ABOVE_3_7_1": False},
    "fla.ops.linear_attn": {"chunk_linear_attn": chunk_linear_attn},
    "fla.ops.retention": {"chunk_retention": chunk_retention},
    "fla.ops.gla": {"chunk_gla": chunk_gla},
    "fla.ops.gsa": {"chunk_gsa": chunk_gsa},
    "fla.ops.delta_rule": {"chunk_delta_rule": chunk_delta_rule},
    "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": chunk_gated_delta_rule},
    "fla.ops.kda": {"chunk_kda": chunk_kda},
    "fla.ops.path_attn": {},
    "fla.ops.path_attn.parallel": {"parallel_path_attn": parallel_path_attn},
}
"""The names of the modules that contain these functions."""


def install(monkeypatch):
    """Make these functions available as an installed package `fla`."""
    for name, members in MODULES.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
