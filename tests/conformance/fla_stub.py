"""The functions of flash-linear-attention 0.6.0 that the benchmarks call, without its kernels.

Each takes the original's arguments, makes its assertions, and asserts the shapes that its kernels
assume. The results are computed by this library.
"""

import sys
from types import ModuleType

import torch

import precondattn as pa


def _one_number_of_heads(x):
    assert x["q"].shape == x["k"].shape
    assert x["v"].shape[:3] == x["q"].shape[:3]


def _values_share_keys(x):
    assert x["q"].shape == x["k"].shape
    assert x["v"].shape[2] % x["q"].shape[2] == 0
    assert x["beta"].shape == x["v"].shape[:3] == x["g"].shape[:3]


def _linear(x):
    _one_number_of_heads(x)
    return pa.Linear(normalize=x.pop("normalize", True))


def _retention(x):
    _one_number_of_heads(x)
    return pa.Retention()


def _gla(x):
    assert x["q"].shape == x["k"].shape == x["g"].shape
    assert x["v"].shape[:3] == x["q"].shape[:3]
    return pa.GLA()


def _gsa(x):
    assert x["s"].shape == x["g"].shape == (*x["k"].shape[:3], x["s"].shape[-1])
    assert x["q"].shape[2] % x["k"].shape[2] == 0
    return pa.GSA()


def _delta(x):
    assert {x[name].dtype for name in "qkv"} == {x["q"].dtype} != {torch.float32}
    _one_number_of_heads(x)
    assert x["beta"].shape == x["q"].shape[:3]
    return pa.Delta()


def _gated_delta(x):
    _values_share_keys(x)
    assert x["g"].ndim == 3
    return pa.GatedDelta()


def _kda(x):
    _values_share_keys(x)
    assert x["q"].shape[3] <= 256
    assert x["g"].shape[3:] == x["q"].shape[3:]
    return pa.KDA()


def _path(x):
    assert x["w"].dtype == x["beta"].dtype == torch.float32
    assert {x["q"].shape[-1], x["v"].shape[-1]} <= {16, 32, 64, 128}
    assert x["q"].shape[-1] == x["k"].shape[-1]
    assert x["k"].shape == x["w"].shape
    assert x["beta"].shape[:3] == x["k"].shape[:3]
    assert x["q"].shape[-2] % x["k"].shape[-2] == 0
    x |= {name: x[name].to(x["q"].dtype) for name in ("w", "beta")}
    return pa.Path()


def _function(made, inputs, options=""):
    """A function with these parameters; those behind the inputs have defaults."""
    inputs, options = inputs.split(), {"scale", "cu_seqlens", *options.split()}

    def called(*arguments, **keywords):
        x = dict(zip(inputs, arguments, strict=False)) | keywords
        assert x.keys() >= {*inputs}
        assert x.keys() <= {*inputs, *options}
        mechanism = made(x)
        out = mechanism(**{name: x[name] for name in mechanism.inputs})
        if made is _gated_delta and out.requires_grad:
            out.register_hook(lambda gradient: _chunk_bwd_dqkwg())
        return out, None

    return called


STATES = "initial_state output_final_state"
NORM = f"{STATES} use_qk_l2norm_in_kernel cu_seqlens_cpu"
RULE = f"{NORM} use_beta_sigmoid_in_kernel allow_neg_eigval state_v_first cp_context"
KDA = (
    f"{RULE} use_gate_in_kernel safe_gate lower_bound disable_recompute"
    " return_intermediate_states use_graph max_num_seqs"
)


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
    "fla.ops.linear_attn": {
        "chunk_linear_attn": _function(_linear, "q k v", f"{STATES} normalize")
    },
    "fla.ops.retention": {"chunk_retention": _function(_retention, "q k v", STATES)},
    "fla.ops.gla": {
        "chunk_gla": _function(_gla, "q k v g", f"{STATES} state_v_first cu_seqlens_cpu")
    },
    "fla.ops.gsa": {
        "chunk_gsa": _function(_gsa, "q k v s g", f"{STATES} checkpoint_level cu_seqlens_cpu")
    },
    "fla.ops.delta_rule": {"chunk_delta_rule": _function(_delta, "q k v beta", NORM)},
    "fla.ops.gated_delta_rule": {
        "chunk_gated_delta_rule": _function(_gated_delta, "q k v g beta", f"{RULE} chunk_indices")
    },
    "fla.ops.kda": {"chunk_kda": _function(_kda, "q k v g beta", KDA)},
    "fla.ops.path_attn": {},
    "fla.ops.path_attn.parallel": {
        "parallel_path_attn": _function(_path, "q k v w beta", "g use_cache")
    },
}
"""The names of the modules that contain these functions."""


def install(monkeypatch):
    """Make these functions available as an installed package `fla`."""
    for name, members in MODULES.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
