"""Other names of mechanisms, with the expression in this library or the nearest one.

They are the names of papers, models and kernels. Using one raises an error that gives the
expression.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

MECHANISMS: dict[str, tuple[str, ...]] = {
    "softmax": (
        "sdpa",
        "scaled_dot_product_attention",
        "attention",
        "flash_attention",
        "flash_attention_2",
        "flash_attention_3",
        "flash_attn",
        "flash",
        "flex_attention",
        "eager",
        "dot_product",
        "multihead_attention",
        "self_attention",
        "mha",
        "gqa",
        "mqa",
    ),
    "softmax[window=128]": ("swa", "sliding_window", "sliding_window_attention", "local_attention"),
    "softmax[forget=unscaled]": ("fox", "forgetting", "forgetting_transformer"),
    "softmax[distance=slopes]": ("alibi",),
    "softmax[distance=buckets]": ("t5",),
    "linear": ("linear_attn", "linear_transformer"),
    "retention": ("retnet", "multiscale_retention"),
    "ssd": ("mamba2",),
    "ssd[scale=none]": (
        "simple_gla",
        "lightning",
        "lightning_attn",
        "lightning_attention",
        "lightning_attention_2",
        "minimax",
    ),
    "gla": ("gated_linear_attention",),
    "gsa": ("gated_slot_attention",),
    "delta": ("deltanet", "delta_rule"),
    "gated_delta": ("gdn", "gated_deltanet", "gated_delta_rule", "qwen3_next"),
    "kda": ("kimi", "kimi_linear", "kimi_delta_attention"),
    "delta_product": ("gdp", "gated_delta_product", "gated_deltaproduct"),
    "dplr": ("rwkv7", "dplr_delta_rule", "generalized_delta_rule"),
    "atk": ("pgdn", "precond_gated_delta", "precond_gated_delta_rule"),
    "atk(kda)": ("pkda", "precond_kda"),
    "stable_step(delta)": ("longhorn",),
    "stable_step[rule=exact](delta)": ("efla",),
    "mesa": ("mesanet",),
    "mlstm": ("xlstm",),
    "differential": ("diff", "diff_attn", "diff_transformer", "differential_transformer"),
    "cross_covariance": ("xca", "xcit"),
    "windowed": ("swin", "swin_transformer"),
    "outlook": ("volo",),
    "channel": ("davit",),
    "nystrom": ("nystromformer",),
}
"""The other names of each expression."""

LIGHTNING = "with the logarithm of its fixed decays as g; retention has those of RetNet"
REMARKS = {
    **dict.fromkeys(("lightning", "lightning_attn", "lightning_attention"), LIGHTNING),
    **dict.fromkeys(("lightning_attention_2", "minimax"), LIGHTNING),
    "mamba2": "pa.mamba2 takes x, dt, A, B and C",
    "rwkv7": "with a, b and the logarithm of the decay as g",
}
"""Further remarks on a foreign name."""


class Near(NamedTuple):
    """The nearest expression to a mechanism that this library does not have."""

    why: str
    """What the foreign mechanism does that no mechanism here does."""
    expression: str
    """The nearest expression."""


BLOCKS = "chooses blocks of keys by their scores"
FEATURES = "has its own features of queries and keys"
NO_KEYS = "has a state of one number for each channel, without keys"
ABSENT: dict[str, Near] = {
    **dict.fromkeys(
        ("nsa", "native_sparse_attention", "moba", "dsa"), Near(BLOCKS, "softmax[window=512]")
    ),
    **dict.fromkeys(
        ("longformer", "bigbird", "reformer"),
        Near("has its own sparse pattern", "softmax[window=512]"),
    ),
    **dict.fromkeys(
        ("log_linear", "log_linear_attn", "log_linear_mamba2"),
        Near("has states of several time scales", "ssd"),
    ),
    **dict.fromkeys(("ttt", "ttt_linear", "ttt_mlp"), Near("trains a model as its state", "delta")),
    "titans": Near("has a momentum of its state", "gated_delta"),
    **dict.fromkeys(("performer", "favor", "rfa", "cosformer"), Near(FEATURES, "elu1(linear)")),
    **dict.fromkeys(("based", "rebased"), Near(FEATURES, "hedgehog(linear)")),
    "linformer": Near("projects keys along time", "nystrom"),
    **dict.fromkeys(("mamba", "mamba1", "s4", "s6", "ssm"), Near(NO_KEYS, "ssd")),
    **dict.fromkeys(("hgrn", "griffin", "hawk", "rglru"), Near(NO_KEYS, "hgrn2")),
    "slstm": Near("has a memory without a parallel form", "mlstm"),
    **dict.fromkeys(("rwkv", "rwkv4", "rwkv5"), Near("is an earlier recurrence", "rwkv6")),
    "abc": Near("has slots without a gate", "gsa"),
    **dict.fromkeys(
        ("mla", "deepseek"),
        Near("makes keys and values of latent ones, as a recipe of a layer may", "softmax"),
    ),
    **dict.fromkeys(
        ("sigmoid", "relu", "softpick", "sparsemax", "entmax", "stickbreaking"),
        Near("has other weights than exponentials", "softmax"),
    ),
}
"""The mechanisms that this library does not have, by name."""

AROUND = re.compile(
    r"^(?:(?:fused|chunk|chunkwise|recurrent|parallel|naive)+)?(.+?)(?:attention|attn|rule)?$"
)
"""The words around a mechanism's name in function names of others, without underscores."""


def _squashed(name: str) -> str:
    return re.sub(r"[-_\s]", "", name).lower()


_EXPRESSIONS = {_squashed(name): text for text, names in MECHANISMS.items() for name in names}
_REMARKS = {_squashed(name): remark for name, remark in REMARKS.items()}
_ABSENT = {_squashed(name): near for name, near in ABSENT.items()}


def expression_elsewhere(name: str, known: Iterable[str]) -> str | None:
    """The expression for another library's name; None for unknown names and for ours."""
    own = {_squashed(each): each for each in known}
    squashed = _squashed(name)
    within = AROUND.sub(r"\1", squashed)
    for each in (squashed, within):
        if each in _EXPRESSIONS:
            return _EXPRESSIONS[each]
    return own.get(within) if within != squashed else None


def mechanism_elsewhere(name: str, known: Iterable[str]) -> str | None:
    """The advice for another library's name of a mechanism; None for any other name."""
    squashed = _squashed(name)
    expression = expression_elsewhere(name, known)
    if expression is not None:
        remark = _REMARKS.get(squashed)
        return f"here it is {expression!r}" + ("" if remark is None else f" ({remark})")
    near = _ABSENT.get(squashed) or _ABSENT.get(AROUND.sub(r"\1", squashed))
    if near is None:
        return None
    return (
        f"it {near.why}, and is not here; near it is {near.expression!r}, and "
        f"docs/write_a_mechanism.md makes one of your own"
    )


def in_our_spelling(name: str, known: Iterable[str]) -> str | None:
    """The known name that differs only in capitals, hyphens and underscores; None without one."""
    squashed = _squashed(name)
    return next((each for each in known if _squashed(each) == squashed), None)
