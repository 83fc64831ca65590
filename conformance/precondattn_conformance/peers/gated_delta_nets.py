"""Gated delta rules of training and serving frameworks in PyTorch."""

from __future__ import annotations

from functools import cache, partial

from precondattn.arrays import Array
from precondattn_conformance.peers import given
from precondattn_conformance.peers.arrays import HALF32, Foreign, scale_of
from precondattn_conformance.peers.project import on_github

MEGATRON = on_github(
    "NVIDIA/Megatron-LM@d98e8a64ddf34856e74b24714e3bedb2f5a39553",
    "2026-08-22",
    "Megatron-LM",
    "megatron",
)
GATED_DELTA_NET = on_github(
    "NVlabs/GatedDeltaNet@5ddd1e4845336f6b07b506ad77a8c92db9e5478d",
    "2025-03-17",
    "Gated DeltaNet",
    "gated-delta-net",
)
FLASHINFER = on_github(
    "flashinfer-ai/flashinfer@fb28d7242b3506a2348265962041acc1fb56cca4", "2026-08-22", "FlashInfer"
)
STATE = ("initial_state", "output_final_state")
ALL = (MEGATRON, GATED_DELTA_NET, FLASHINFER)


@cache
def _of_megatron(path: str, function: str, *more: str) -> Foreign:
    return getattr(MEGATRON.excerpt(path, function, *more, imported=given.of_pytorch()), function)


ROW = {"library": "torch", "heads": "equal", "dtypes": HALF32, "state": STATE}
NARROW = (
    "centering 'keeps exp() in fp32 range for roughly twice the decay strength', and not for more"
)
for _file, _mechanism, _function, _takes, _limits in (
    ("gdn", "gated_delta", "torch_chunk_gated_delta_rule", "q k v g beta scale= **state", {}),
    ("gdn2", "gdn2", "torch_chunk_gdn2", "q k v g b w scale= **state", {"stability": NARROW}),
):
    _load = partial(_of_megatron, f"megatron/core/ssm/gated_delta_net/{_file}.py", _function)
    MEGATRON.direct(_function, _mechanism, _load, _takes, **ROW, limits=_limits)


@MEGATRON.peer("gated_delta", library="torch", dtypes=HALF32, gradient=False)
def gated_delta_rule_ref(
    q: Array, k: Array, v: Array, g: Array, beta: Array, scale: float | None
) -> Array:
    """The reference of the project's tests, which changes the state in place."""
    import torch

    path = "tests/unit_tests/ssm/test_gdp_dynamic_inference.py"
    state = torch.zeros(q.shape[0], v.shape[2], q.shape[3], v.shape[3])
    return _of_megatron(path, "_gated_delta_rule_ref")(q, k, v, g, beta, state, None, False, scale)


@MEGATRON.peer("softmax[sink=true]", library="torch", heads="equal", dtypes=HALF32)
def sink_attention_reference(
    q: Array, k: Array, v: Array, scale: float | None, sink: Array
) -> Array:
    path = "tests/unit_tests/inference/test_dynamic_sink_attention.py"
    run = _of_megatron(path, "_sink_attention_reference")
    return run(q, k, v, scale_of(q, scale), sink).to(q.dtype)


@cache
def _of_gated_delta_net(function: str) -> Foreign:
    path = "lit_gpt/gated_delta_rule_ops/chunk.py"
    names = given.of_pytorch() | given.of_einops()
    return getattr(GATED_DELTA_NET.excerpt(path, function, imported=names), function)


@GATED_DELTA_NET.peer("gated_delta", library="torch", layout="bhtd", heads="equal", dtypes=HALF32)
def recurrent_gated_delta_rule_ref(q: Array, k: Array, v: Array, g: Array, beta: Array) -> Array:
    return _of_gated_delta_net("recurrent_gated_delta_rule_ref")(q, k, v, beta, g).to(q.dtype)


@GATED_DELTA_NET.peer(
    "gated_delta", library="torch", layout="bhtd", heads="equal", multiple=64, dtypes=HALF32
)
def chunk_gated_delta_rule_ref(q: Array, k: Array, v: Array, g: Array, beta: Array) -> Array:
    return _of_gated_delta_net("chunk_gated_delta_rule_ref")(q, k, v, beta, g, 64)[0].to(q.dtype)


@FLASHINFER.peer("kda", library="torch", heads="equal", dtypes=HALF32, state=STATE)
def naive_recurrent_kda(
    q: Array, k: Array, v: Array, g: Array, beta: Array, scale: float | None, **state: object
) -> object:
    path, function = "tests/kda/test_recurrent_kda.py", "naive_recurrent_kda"
    run = FLASHINFER.excerpt(path, function, imported=given.of_pytorch())
    return run.naive_recurrent_kda(q, k, v, g, beta, scale, **state)


@FLASHINFER.peer(
    "gated_delta",
    library="torch",
    heads="equal",
    widths="equal",
    dtypes=HALF32[:1],
    gradient=False,
)
def delta_rule(q: Array, k: Array, v: Array, g: Array, beta: Array, scale: float | None) -> Array:
    """Takes sequences one after another in one array, and changes its state in place."""
    path, more = "tests/gdn/reference_delta_rule.py", ("matmul", "exclusive_cumsum")
    run = FLASHINFER.excerpt(path, "delta_rule", *more, imported=given.of_pytorch()).delta_rule
    q, k, v, decay, beta_ = (x.flatten(0, 1) for x in (q, k, v, g.exp(), beta))
    lengths = [g.shape[1]] * g.shape[0]
    out, _ = run(q, k, v, lengths, alpha=decay, beta=beta_, scale_factor=scale_of(q, scale))
    return out.unflatten(0, g.shape[:2])
