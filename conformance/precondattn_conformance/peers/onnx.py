"""ONNX: the operators Attention and LinearAttention, run by its reference evaluator in NumPy."""

from __future__ import annotations

from functools import cache, partial

from precondattn.arrays import Array
from precondattn_conformance.peers.arrays import Foreign, mask_with_bias, scale_of
from precondattn_conformance.peers.project import Project

ONNX = Project("onnx", "ONNX", "https://github.com/onnx/onnx", package="onnx")


@cache
def _evaluator(
    operator: str, inputs: tuple[str, ...], attributes: tuple[tuple[str, Foreign], ...]
) -> Foreign:
    """A graph with one node. An operator's first output is the result, its second a state."""
    helper = ONNX.imported("onnx.helper")
    evaluated = ONNX.imported("onnx.reference").ReferenceEvaluator
    opset = ONNX.imported("onnx.defs").onnx_opset_version()
    node = helper.make_node(operator, inputs, ["out", "second"], **dict(attributes))
    tensor = helper.make_tensor_value_info
    used = [tensor(name, 0, None) for name in inputs if name]
    graph = helper.make_graph(
        [node], operator, used, [tensor("out", 0, None), tensor("second", 0, None)]
    )
    imports = [helper.make_opsetid("", opset)]
    return evaluated(helper.make_model(graph, opset_imports=imports))


def _run(operator: str, inputs: dict[str, Array | None], **attributes: Foreign) -> list[Array]:
    """The outputs of an operator; an input that is None is left out."""
    names = tuple(name if x is not None else "" for name, x in inputs.items())
    arrays = {name: x for name, x in inputs.items() if x is not None}
    options = tuple((name, x) for name, x in attributes.items() if x is not None)
    return list(_evaluator(operator, names, options).run(None, arrays))


@ONNX.peer("softmax", library="numpy", layout="bhtd", gradient=False)
def attention(
    q: Array,
    k: Array,
    v: Array,
    visible: Array,
    scale: float | None,
    softcap: float | None,
    bias: Array | None = None,
) -> Array:
    mask = mask_with_bias(visible, bias, q)
    inputs: dict[str, Array | None] = {"Q": q, "K": k, "V": v, "attn_mask": mask}
    return _run("Attention", inputs, scale=scale, softcap=softcap)[0]


@ONNX.peer("softmax", library="numpy", layout="bhtd", gradient=False)
def attention_is_causal(
    q: Array, k: Array, v: Array, causal: bool, window: int | None, scale: float | None
) -> Array:
    near: dict[str, int] = {}
    if window is not None:  # Here the window includes the token itself.
        near = {"left_window_size": window - 1, "right_window_size": window - 1}
    inputs: dict[str, Array | None] = {"Q": q, "K": k, "V": v}
    return _run("Attention", inputs, is_causal=int(causal), scale=scale, **near)[0]


def _linear_attention(
    rule: str,
    q: Array,
    k: Array,
    v: Array,
    scale: float | None,
    state: Array | None,
    g: Array | None = None,
    beta: Array | None = None,
) -> tuple[Array, Array]:
    def flat(x: Array | None) -> Array | None:
        return None if x is None else x.reshape(*x.shape[:2], -1)

    inputs = {"query": flat(q), "key": flat(k), "value": flat(v), "past_state": state}
    inputs |= {"decay": flat(g), "beta": beta}
    while list(inputs.values())[-1] is None:
        inputs.popitem()
    heads = {"q_num_heads": q.shape[2], "kv_num_heads": k.shape[2]}
    scale = scale_of(q, scale)
    out, last = _run("LinearAttention", inputs, update_rule=rule, scale=scale, **heads)
    return out.reshape(*q.shape[:3], v.shape[-1]), last


_arrangement: Foreign
for _name, _mechanism, _rule, _takes, _arrangement in (
    ("linear", "linear", "linear", "", {}),
    ("gated_by_head", "ssd", "gated", "g=", {"heads": "equal"}),
    ("gated_by_channel", "gla", "gated", "g=", {}),
    ("delta", "delta", "delta", "beta=", {"heads": "equal"}),
    ("gated_delta", "gated_delta", "gated_delta", "g= beta=", {"heads": "equal"}),
    ("gated_delta_by_channel", "kda", "gated_delta", "g= beta=", {"heads": "equal"}),
):
    _load, _takes = (
        partial(partial, _linear_attention, _rule),
        f"q k v scale initial_state? {_takes}",
    )
    _arrangement = {"library": "numpy", "gradient": False, **_arrangement}
    ONNX.direct(f"linear_attention_{_name}", _mechanism, _load, _takes, **_arrangement)
