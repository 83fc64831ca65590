"""The parameters of the shorthands, which `docs/make_pages.py` writes from the declarations.

The text of an array's annotation is its shape (`precondattn/algebra/declaration.py`).
"""

from collections.abc import Sequence
from typing import Annotated, Literal

from precondattn.algebra.piece import BackendNames
from precondattn.arrays import Array

__all__ = [
    "atk",
    "bidirectional",
    "ccq",
    "channel",
    "comba",
    "contraction_gate",
    "cross_covariance",
    "delta",
    "delta_product",
    "deltaformer",
    "differential",
    "dplr",
    "elu1",
    "gated_delta",
    "gdn2",
    "gla",
    "gsa",
    "hedgehog",
    "hgrn2",
    "kda",
    "laser",
    "linear",
    "lucid",
    "mesa",
    "mlstm",
    "nystrom",
    "outlook",
    "path",
    "per_dim_scale",
    "qk_norm",
    "retention",
    "row_normalized",
    "rwkv6",
    "softmax",
    "ssd",
    "stable_step",
    "temperature",
    "windowed",
]

def atk(
    q: Annotated[Array, "b t h d"],
    k: Annotated[Array, "b s h d unit row"],
    v: Annotated[Array, "b s u e"],
    *,
    g: Annotated[Array, "b s u in (-inf, 0]"],
    beta: Annotated[Array, "b s u in [0, 1]"],
    g_atk: Annotated[Array, "b s h in (-inf, 0]"],
    beta_atk: Annotated[Array, "b s h in (0, 1]"],
    log_atk_scale: Annotated[Array, "h"] = ...,
    bound: float = 1.5,
    eps: float = 1e-06,
    center: float = -0.2,
    learned: bool = False,
    segment_ids: Array | None = None,
    cu_seqlens: Array | Sequence[int] | None = None,
    lengths: Array | Sequence[int] | None = None,
    key_mask: Array | None = None,
    prefix: Array | Sequence[int] | None = None,
    attn_mask: Array | None = None,
    backend: BackendNames = None,
) -> Array:
    """ATK: a delta rule that erases with k and writes with m ∘ k, where m depends on earlier keys.

    `ATK`, built from its options and called. An optional input sets its own.
    Options: bound, eps, center, learned.
    """

def bidirectional(
    q: Annotated[Array, "b t h d"],
    k: Annotated[Array, "b s n d"],
    v: Annotated[Array, "b s n e"],
    *,
    combine: Literal["sum", "concat"] = "sum",
    segment_ids: Array | None = None,
    cu_seqlens: Array | Sequence[int] | None = None,
    lengths: Array | Sequence[int] | None = None,
    key_mask: Array | None = None,
    prefix: Array | Sequence[int] | None = None,
    attn_mask: Array | None = None,
    backend: BackendNames = None,
) -> Array:
    """o = → + ← − own: a forward and a backward recurrence, minus what both read of the token.

    `Bidirectional`, built from its options and called. An optional input sets its own.
    Options: combine.
    """

def ccq(
    q: Annotated[Array, "b t h d"],
    k: Annotated[Array, "b s n d"],
    v: Annotated[Array, "b s n e"],
    *,
    contraction: Annotated[Array, "b t h in [0, 1]"],
    g: Annotated[Array, "b s h in (-inf, 0]"] = ...,
    slopes: Annotated[Array, "h in [0, inf)"] = ...,
    bucket_table: Annotated[Array, "32 h"] = ...,
    covariance: Literal["running", "decayed", "query_weighted"] = "running",
    backbone_key: Literal["auto", "raw", "unit"] = "auto",
    tau: float = 1.0,
    eps: float = 1e-06,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    bias: bool | Annotated[Array, "1|b 1|h t s"] = False,
    forget: Literal["none", "unscaled", "scaled"] = "none",
    read: Literal["mean", "log_mean_exp", "mean_and_log_sum"] = "mean",
    softcap: float | None = None,
    sink: bool | Annotated[Array, "h"] = False,
    distance: Literal["none", "slopes", "buckets"] = "none",
    buckets: int = 32,
    max_distance: int = 128,
    segment_ids: Array | None = None,
    cu_seqlens: Array | Sequence[int] | None = None,
    lengths: Array | Sequence[int] | None = None,
    key_mask: Array | None = None,
    prefix: Array | Sequence[int] | None = None,
    attn_mask: Array | None = None,
    backend: BackendNames = None,
) -> Array:
    """CCQ: o = base(q^c, k, v), q^c = (I − λ Σ) q̄, where Σ is the running covariance of k̄.

    `CCQ`, built from its options and called. An optional input sets its own.
    Options: covariance, backbone_key, tau, eps.
    Those of the softmax inside: causal, scale, window, bias, forget, read, softcap, sink, distance,
    buckets, max_distance.
    """

def channel(
    q: Annotated[Array, "b t h d"],
    k: Annotated[Array, "b s n d"],
    v: Annotated[Array, "b s n d"],
    *,
    scale: float | None = None,
    scale_by: Literal["width", "tokens"] = "width",
    segment_ids: Array | None = None,
    cu_seqlens: Array | Sequence[int] | None = None,
    lengths: Array | Sequence[int] | None = None,
    key_mask: Array | None = None,
    prefix: Array | Sequence[int] | None = None,
    attn_mask: Array | None = None,
    backend: BackendNames = None,
) -> Array:
    """Attention between channels: o_t = softmax(s qᵀ k) v_t.

    `Channel`, built from its options and called. An optional input sets its own.
    Options: scale, scale_by.
    """

def comba(
    q: Annotated[Array, "b t h d"],
    k: Annotated[Array, "b s h d unit row"],
    v: Annotated[Array, "b s u e"],
    *,
    p: Annotated[Array, "b s h d unit row"],
    g: Annotated[Array, "b s u in (-inf, 0]"],
    beta: Annotated[Array, "b s u in [0, 1] or b s u in [0, 2]"],
    scale: float | None = None,
    erases: Literal["undecayed", "decayed"] = "undecayed",
    segment_ids: Array | None = None,
    cu_seqlens: Array | Sequence[int] | None = None,
    lengths: Array | Sequence[int] | None = None,
    key_mask: Array | None = None,
    prefix: Array | Sequence[int] | None = None,
    attn_mask: Array | None = None,
    backend: BackendNames = None,
) -> Array:
    """Comba: o_t = s S_tᵀ q_t, S_t = e^{g_t} S_{t−1} + β_t k_t (v_t − S_{t−1}ᵀ p_t)ᵀ.

    `Comba`, built from its options and called. An optional input sets its own.
    Options: scale, erases.
    """

def contraction_gate(
    q: Annotated[Array, "b t h d"],
    weight: Annotated[Array, "h d"],
    bias: Annotated[Array, "h"],
    *,
    eps: float = 1e-06,
    segment_ids: Array | None = None,
    cu_seqlens: Array | Sequence[int] | None = None,
    lengths: Array | Sequence[int] | None = None,
    key_mask: Array | None = None,
    prefix: Array | Sequence[int] | None = None,
    attn_mask: Array | None = None,
    backend: BackendNames = None,
) -> Array:
    """λ = σ(w·q̄ + b) of shape (b, t, h), with `weight` (h, d) and `bias` (h).

    `ContractionGate`, built from its options and called. An optional input sets its own.
    Options: eps.
    """

def cross_covariance(
    q: Annotated[Array, "b t h d"],
    k: Annotated[Array, "b s n d"],
    v: Annotated[Array, "b s n d"],
    *,
    logit_scale: Annotated[Array, "h"],
    eps: float = 1e-06,
    segment_ids: Array | None = None,
    cu_seqlens: Array | Sequence[int] | None = None,
    lengths: Array | Sequence[int] | None = None,
    key_mask: Array | None = None,
    prefix: Array | Sequence[int] | None = None,
    attn_mask: Array | None = None,
    backend: BackendNames = None,
) -> Array:
    """Attention between channels: o_t = softmax(γ q̂ᵀ k̂) v_t.

    `CrossCovariance`, built from its options and called. An optional input sets its own.
    Options: eps.
    """

def delta(
    q: Annotated[Array, "b t h d"],
    k: Annotated[Array, "b s h d unit row"],
    v: Annotated[Array, "b s u e"],
    *,
    beta: Annotated[Array, "b s u in [0, 2]"],
    scale: float | None = None,
    segment_ids: Array | None = None,
    cu_seqlens: Array | Sequence[int] | None = None,
    lengths: Array | Sequence[int] | None = None,
    key_mask: Array | None = None,
    prefix: Array | Sequence[int] | None = None,
    attn_mask: Array | None = None,
    backend: BackendNames = None,
) -> Array:
    """DeltaNet: o_t = s S_tᵀ q_t, S_t = S_{t−1} + β_t k_t (v_t − S_{t−1}ᵀ k_t)ᵀ.

    `Delta`, built from its options and called. An optional input sets its own.
    Options: scale.
    """

def delta_product(
    q: Annotated[Array, "b t h d"],
    k: Annotated[Array, "b s 2 h d unit row"],
    v: Annotated[Array, "b s 2 u e"],
    *,
    g: Annotated[Array, "b s u in (-inf, 0]"],
    beta: Annotated[Array, "b s 2 u in [0, 2]"],
    scale: float | None = None,
    steps: int = 2,
    segment_ids: Array | None = None,
    cu_seqlens: Array | Sequence[int] | None = None,
    lengths: Array | Sequence[int] | None = None,
    key_mask: Array | None = None,
    prefix: Array | Sequence[int] | None = None,
    attn_mask: Array | None = None,
    backend: BackendNames = None,
) -> Array:
    """Gated DeltaProduct: n steps S ← S + β_j k_j (v_j − Sᵀ k_j)ᵀ for each token, after e^{g} S.

    `DeltaProduct`, built from its options and called. An optional input sets its own.
    Options: scale, steps.
    """

def deltaformer(
    q: Annotated[Array, "b s h d"],
    k: Annotated[Array, "b s n d"],
    v: Annotated[Array, "b s n e"],
    *,
    beta: Annotated[Array, "b s h in [0, 1]"],
    scale: float | None = None,
    segment_ids: Array | None = None,
    cu_seqlens: Array | Sequence[int] | None = None,
    lengths: Array | Sequence[int] | None = None,
    key_mask: Array | None = None,
    prefix: Array | Sequence[int] | None = None,
    attn_mask: Array | None = None,
    backend: BackendNames = None,
) -> Array:
    """DeltaFormer: o = A u, with (I + diag(β) P) u = v.

    `DeltaFormer`, built from its options and called. An optional input sets its own.
    Options: scale.
    """

def differential(
    q: Annotated[Array, "b t h d"],
    k: Annotated[Array, "b s n d"],
    v: Annotated[Array, "b s n e"],
    *,
    q2: Annotated[Array, "b t h d"],
    k2: Annotated[Array, "b s n d"],
    lam: Annotated[Array, "a number or h or b t h"],
    g: Annotated[Array, "b s h in (-inf, 0]"] = ...,
    slopes: Annotated[Array, "h in [0, inf)"] = ...,
    bucket_table: Annotated[Array, "32 h"] = ...,
    per: Literal["layer", "head", "token"] = "layer",
    paired: str | Sequence[str] = ("q", "k"),
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    bias: bool | Annotated[Array, "1|b 1|h t s"] = False,
    forget: Literal["none", "unscaled", "scaled"] = "none",
    read: Literal["mean", "log_mean_exp", "mean_and_log_sum"] = "mean",
    softcap: float | None = None,
    sink: bool | Annotated[Array, "h"] = False,
    distance: Literal["none", "slopes", "buckets"] = "none",
    buckets: int = 32,
    max_distance: int = 128,
    segment_ids: Array | None = None,
    cu_seqlens: Array | Sequence[int] | None = None,
    lengths: Array | Sequence[int] | None = None,
    key_mask: Array | None = None,
    prefix: Array | Sequence[int] | None = None,
    attn_mask: Array | None = None,
    backend: BackendNames = None,
) -> Array:
    """Differential attention: o = base(q, k, v) − λ base(q2, k2, v).

    `Differential`, built from its options and called. An optional input sets its own.
    Options: per, paired.
    Those of the softmax inside: causal, scale, window, bias, forget, read, softcap, sink, distance,
    buckets, max_distance.
    """

def dplr(
    q: Annotated[Array, "b t h d"],
    k: Annotated[Array, "b s h d"],
    v: Annotated[Array, "b s u e"],
    *,
    a: Annotated[Array, "b s h d unit row"],
    b: Annotated[Array, "b s h d unit row"],
    g: Annotated[Array, "b s u d in (-inf, 0]"],
    scale: float | None = None,
    segment_ids: Array | None = None,
    cu_seqlens: Array | Sequence[int] | None = None,
    lengths: Array | Sequence[int] | None = None,
    key_mask: Array | None = None,
    prefix: Array | Sequence[int] | None = None,
    attn_mask: Array | None = None,
    backend: BackendNames = None,
) -> Array:
    """DPLR: o_t = s S_tᵀ q_t, S_t = diag(e^{g_t}) S_{t−1} + b_t (S_{t−1}ᵀ a_t)ᵀ + k_t v_tᵀ.

    `DPLR`, built from its options and called. An optional input sets its own.
    Options: scale.
    """

def elu1(
    q: Annotated[Array, "b t h d"],
    k: Annotated[Array, "b s n d"],
    v: Annotated[Array, "b s n e"],
    *,
    g: Annotated[Array, "b s h in (-inf, 0]"] = ...,
    slopes: Annotated[Array, "h in [0, inf)"] = ...,
    bucket_table: Annotated[Array, "32 h"] = ...,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    bias: bool | Annotated[Array, "1|b 1|h t s"] = False,
    forget: Literal["none", "unscaled", "scaled"] = "none",
    read: Literal["mean", "log_mean_exp", "mean_and_log_sum"] = "mean",
    softcap: float | None = None,
    sink: bool | Annotated[Array, "h"] = False,
    distance: Literal["none", "slopes", "buckets"] = "none",
    buckets: int = 32,
    max_distance: int = 128,
    segment_ids: Array | None = None,
    cu_seqlens: Array | Sequence[int] | None = None,
    lengths: Array | Sequence[int] | None = None,
    key_mask: Array | None = None,
    prefix: Array | Sequence[int] | None = None,
    attn_mask: Array | None = None,
    backend: BackendNames = None,
) -> Array:
    """The feature map φ(x) = elu(x) + 1, which is positive: o = base(φ(q), φ(k), v).

    `Elu1`, built from its options and called. An optional input sets its own.
    Those of the softmax inside: causal, scale, window, bias, forget, read, softcap, sink, distance,
    buckets, max_distance.
    """

def gated_delta(
    q: Annotated[Array, "b t h d"],
    k: Annotated[Array, "b s h d unit row"],
    v: Annotated[Array, "b s u e"],
    *,
    g: Annotated[Array, "b s u in (-inf, 0]"],
    beta: Annotated[Array, "b s u in [0, 2]"],
    scale: float | None = None,
    segment_ids: Array | None = None,
    cu_seqlens: Array | Sequence[int] | None = None,
    lengths: Array | Sequence[int] | None = None,
    key_mask: Array | None = None,
    prefix: Array | Sequence[int] | None = None,
    attn_mask: Array | None = None,
    backend: BackendNames = None,
) -> Array:
    """Gated DeltaNet: o_t = s S_tᵀ q_t, S_t = S' + β_t k_t (v_t − S'ᵀ k_t)ᵀ, S' = e^{g_t} S_{t−1}.

    `GatedDelta`, built from its options and called. An optional input sets its own.
    Options: scale.
    """

def gdn2(
    q: Annotated[Array, "b t h d"],
    k: Annotated[Array, "b s h d unit row"],
    v: Annotated[Array, "b s u e"],
    *,
    g: Annotated[Array, "b s u d in (-inf, 0]"],
    b: Annotated[Array, "b s u d in [0, 2]"],
    w: Annotated[Array, "b s u e in [0, 1]"],
    scale: float | None = None,
    segment_ids: Array | None = None,
    cu_seqlens: Array | Sequence[int] | None = None,
    lengths: Array | Sequence[int] | None = None,
    key_mask: Array | None = None,
    prefix: Array | Sequence[int] | None = None,
    attn_mask: Array | None = None,
    backend: BackendNames = None,
) -> Array:
    """Gated DeltaNet 2: S_t = S' + k_t (w_t ∘ v_t − S'ᵀ (b_t ∘ k_t))ᵀ, S' = diag(e^{g_t}) S_{t−1}.

    `GDN2`, built from its options and called. An optional input sets its own.
    Options: scale.
    """

def gla(
    q: Annotated[Array, "b t h d"],
    k: Annotated[Array, "b s n d"],
    v: Annotated[Array, "b s n e"],
    *,
    g: Annotated[Array, "b s n d in (-inf, 0]"],
    scale: float | None = None,
    segment_ids: Array | None = None,
    cu_seqlens: Array | Sequence[int] | None = None,
    lengths: Array | Sequence[int] | None = None,
    key_mask: Array | None = None,
    prefix: Array | Sequence[int] | None = None,
    attn_mask: Array | None = None,
    backend: BackendNames = None,
) -> Array:
    """Gated linear attention: o_i = s Σ_{j≤i} Σ_c q_ic k_jc e^{g_{j+1,c} + … + g_ic} v_j.

    `GLA`, built from its options and called. An optional input sets its own.
    Options: scale.
    """

def gsa(
    q: Annotated[Array, "b t h d"],
    k: Annotated[Array, "b s n d"],
    v: Annotated[Array, "b s n e"],
    *,
    s: Annotated[Array, "b s n m in [0, 1]"],
    g: Annotated[Array, "b s n m in (-inf, 0]"],
    scale: float | None = None,
    segment_ids: Array | None = None,
    cu_seqlens: Array | Sequence[int] | None = None,
    lengths: Array | Sequence[int] | None = None,
    key_mask: Array | None = None,
    prefix: Array | Sequence[int] | None = None,
    attn_mask: Array | None = None,
    backend: BackendNames = None,
) -> Array:
    """Gated slot attention: p_t = softmax(s K_tᵀ q_t), o_t = V_tᵀ p_t over m slots.

    `GSA`, built from its options and called. An optional input sets its own.
    Options: scale.
    """

def hedgehog(
    q: Annotated[Array, "b t h d"],
    k: Annotated[Array, "b s n d"],
    v: Annotated[Array, "b s n e"],
    *,
    q_weight: Annotated[Array, "d d or h d d"],
    q_bias: Annotated[Array, "d or h d"],
    k_weight: Annotated[Array, "d d or n d d"],
    k_bias: Annotated[Array, "d or n d"],
    g: Annotated[Array, "b s h in (-inf, 0]"] = ...,
    slopes: Annotated[Array, "h in [0, inf)"] = ...,
    bucket_table: Annotated[Array, "32 h"] = ...,
    factor: float = 1.0,
    per: Literal["layer", "head"] = "layer",
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    bias: bool | Annotated[Array, "1|b 1|h t s"] = False,
    forget: Literal["none", "unscaled", "scaled"] = "none",
    read: Literal["mean", "log_mean_exp", "mean_and_log_sum"] = "mean",
    softcap: float | None = None,
    sink: bool | Annotated[Array, "h"] = False,
    distance: Literal["none", "slopes", "buckets"] = "none",
    buckets: int = 32,
    max_distance: int = 128,
    segment_ids: Array | None = None,
    cu_seqlens: Array | Sequence[int] | None = None,
    lengths: Array | Sequence[int] | None = None,
    key_mask: Array | None = None,
    prefix: Array | Sequence[int] | None = None,
    attn_mask: Array | None = None,
    backend: BackendNames = None,
) -> Array:
    """The feature map φ(x) = softmax([y, −y]) of width 2d, with y = c (W x + b).

    `Hedgehog`, built from its options and called. An optional input sets its own.
    Options: factor, per.
    Those of the softmax inside: causal, scale, window, bias, forget, read, softcap, sink, distance,
    buckets, max_distance.
    """

def hgrn2(
    q: Annotated[Array, "b t h d"],
    v: Annotated[Array, "b s n e"],
    g: Annotated[Array, "b s n d in (-inf, 0]"],
    *,
    scale: float | None = None,
    segment_ids: Array | None = None,
    cu_seqlens: Array | Sequence[int] | None = None,
    lengths: Array | Sequence[int] | None = None,
    key_mask: Array | None = None,
    prefix: Array | Sequence[int] | None = None,
    attn_mask: Array | None = None,
    backend: BackendNames = None,
) -> Array:
    """HGRN2: o_i = s Σ_{j≤i} Σ_c q_ic (1 − e^{g_jc}) e^{g_{j+1,c} + … + g_ic} v_j.

    `HGRN2`, built from its options and called. An optional input sets its own.
    Options: scale.
    """

def kda(
    q: Annotated[Array, "b t h d"],
    k: Annotated[Array, "b s h d unit row"],
    v: Annotated[Array, "b s u e"],
    *,
    g: Annotated[Array, "b s u d in (-inf, 0]"],
    beta: Annotated[Array, "b s u in [0, 2]"],
    scale: float | None = None,
    segment_ids: Array | None = None,
    cu_seqlens: Array | Sequence[int] | None = None,
    lengths: Array | Sequence[int] | None = None,
    key_mask: Array | None = None,
    prefix: Array | Sequence[int] | None = None,
    attn_mask: Array | None = None,
    backend: BackendNames = None,
) -> Array:
    """Kimi Delta Attention: o_t = s S_tᵀ q_t, S_t = S' + β_t k_t (v_t − S'ᵀ k_t)ᵀ.

    `KDA`, built from its options and called. An optional input sets its own.
    Options: scale.
    """

def laser(
    q: Annotated[Array, "b t h d"],
    k: Annotated[Array, "b s n d"],
    v: Annotated[Array, "b s n e"],
    *,
    g: Annotated[Array, "b s h in (-inf, 0]"] = ...,
    slopes: Annotated[Array, "h in [0, inf)"] = ...,
    bucket_table: Annotated[Array, "32 h"] = ...,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    bias: bool | Annotated[Array, "1|b 1|h t s"] = False,
    forget: Literal["none", "unscaled", "scaled"] = "none",
    read: Literal["mean", "log_mean_exp", "mean_and_log_sum"] = "mean",
    softcap: float | None = None,
    sink: bool = False,
    distance: Literal["none", "slopes", "buckets"] = "none",
    buckets: int = 32,
    max_distance: int = 128,
    segment_ids: Array | None = None,
    cu_seqlens: Array | Sequence[int] | None = None,
    lengths: Array | Sequence[int] | None = None,
    key_mask: Array | None = None,
    prefix: Array | Sequence[int] | None = None,
    attn_mask: Array | None = None,
    backend: BackendNames = None,
) -> Array:
    """LASER: o = log(A eᵛ) in place of o = A v, with elementwise exponential and logarithm.

    `Laser`, built from its options and called. An optional input sets its own.
    Those of the softmax inside: causal, scale, window, bias, forget, read, softcap, sink, distance,
    buckets, max_distance.
    """

def linear(
    q: Annotated[Array, "b t h d"],
    k: Annotated[Array, "b s n d"],
    v: Annotated[Array, "b s n e"],
    *,
    scale: float | None = None,
    normalize: bool = False,
    eps: float = 1e-10,
    segment_ids: Array | None = None,
    cu_seqlens: Array | Sequence[int] | None = None,
    lengths: Array | Sequence[int] | None = None,
    key_mask: Array | None = None,
    prefix: Array | Sequence[int] | None = None,
    attn_mask: Array | None = None,
    backend: BackendNames = None,
) -> Array:
    """Linear attention: o_i = s Σ_{j≤i} (q_i·k_j) v_j, in linear time. Causal.

    `Linear`, built from its options and called. An optional input sets its own.
    Options: scale, normalize, eps.
    """

def lucid(
    q: Annotated[Array, "b t h d"],
    k: Annotated[Array, "b s n d"],
    v: Annotated[Array, "b s n e"],
    *,
    lucid_beta: Annotated[Array, "b s n in [0, 2]"] = ...,
    g: Annotated[Array, "b s h in (-inf, 0]"] = ...,
    slopes: Annotated[Array, "h in [0, inf)"] = ...,
    bucket_table: Annotated[Array, "32 h"] = ...,
    normalize: Literal["keys", "queries_and_keys", "rows", "none"] = "keys",
    scale: float | None = None,
    eps: float = 1e-06,
    beta: bool = False,
    detach_max: bool = False,
    rho: float | None = None,
    tolerance: float | None = None,
    iterations: int | None = None,
    metric: Literal["base", "dot"] = "base",
    causal: bool = True,
    window: int | None = None,
    bias: bool | Annotated[Array, "1|b 1|h t s"] = False,
    forget: Literal["none", "unscaled", "scaled"] = "none",
    read: Literal["mean", "log_mean_exp", "mean_and_log_sum"] = "mean",
    softcap: float | None = None,
    sink: bool | Annotated[Array, "h"] = False,
    distance: Literal["none", "slopes", "buckets"] = "none",
    buckets: int = 32,
    max_distance: int = 128,
    segment_ids: Array | None = None,
    cu_seqlens: Array | Sequence[int] | None = None,
    lengths: Array | Sequence[int] | None = None,
    key_mask: Array | None = None,
    prefix: Array | Sequence[int] | None = None,
    attn_mask: Array | None = None,
    backend: BackendNames = None,
) -> Array:
    """LUCID: o = base(q, k, y), with (I + diag(β) stril(Φ)) y = diag(β) v.

    `Lucid`, built from its options and called. An optional input sets its own.
    Options: normalize, scale, eps, beta, detach_max, rho, tolerance, iterations, metric.
    Those of the softmax inside: causal, window, bias, forget, read, softcap, sink, distance,
    buckets, max_distance.
    """

def mesa(
    q: Annotated[Array, "b t u d or b t h d"],
    k: Annotated[Array, "b s u d or b s h d"],
    v: Annotated[Array, "b s u e"],
    *,
    g: Annotated[Array, "b s u in (-inf, 0]"],
    lam_mesa: Annotated[Array, "u d in [0.25, 4] or h d in [0.25, 4]"],
    beta_mesa: Annotated[Array, "b s u in [0, 1]"] = ...,
    decay: bool = True,
    beta: bool = False,
    tolerance: float | None = None,
    iterations: int | None = None,
    segment_ids: Array | None = None,
    cu_seqlens: Array | Sequence[int] | None = None,
    lengths: Array | Sequence[int] | None = None,
    key_mask: Array | None = None,
    prefix: Array | Sequence[int] | None = None,
    attn_mask: Array | None = None,
    backend: BackendNames = None,
) -> Array:
    """Mesa: o = base(q*, k, v), q* = (H + diag λ)⁻¹ q, H_t = e^{g_t} H_{t−1} + β_t k_t k_tᵀ.

    `Mesa`, built from its options and called. An optional input sets its own.
    Options: decay, beta, tolerance, iterations.
    """

def mlstm(
    q: Annotated[Array, "b t h d"],
    k: Annotated[Array, "b s n d"],
    v: Annotated[Array, "b s n e"],
    *,
    g: Annotated[Array, "b s h in (-inf, 0]"],
    i: Annotated[Array, "b s h"],
    scale: float | None = None,
    eps: float = 1e-06,
    segment_ids: Array | None = None,
    cu_seqlens: Array | Sequence[int] | None = None,
    lengths: Array | Sequence[int] | None = None,
    key_mask: Array | None = None,
    prefix: Array | Sequence[int] | None = None,
    attn_mask: Array | None = None,
    backend: BackendNames = None,
) -> Array:
    """mLSTM: o_t = s C_tᵀ q_t / max(|s n_tᵀ q_t|, 1), C and n decayed sums of e^{i} k vᵀ, e^{i} k.

    `MLSTM`, built from its options and called. An optional input sets its own.
    Options: scale, eps.
    """

def nystrom(
    q: Annotated[Array, "b t h d"],
    k: Annotated[Array, "b s n d"],
    v: Annotated[Array, "b s n e"],
    *,
    landmarks: int = 64,
    iterations: int = 6,
    scale: float | None = None,
    start: Literal["matrix", "batch"] = "matrix",
    skip: bool | Annotated[Array, "h m"] = False,
    segment_ids: Array | None = None,
    cu_seqlens: Array | Sequence[int] | None = None,
    lengths: Array | Sequence[int] | None = None,
    key_mask: Array | None = None,
    prefix: Array | Sequence[int] | None = None,
    attn_mask: Array | None = None,
    backend: BackendNames = None,
) -> Array:
    """Softmax attention through m landmarks: o = softmax(s q k̃ᵀ) A⁺ softmax(s q̃ kᵀ) v.

    `Nystrom`, built from its options and called. An optional input sets its own.
    Options: landmarks, iterations, scale, start, skip.
    """

def outlook(
    logits: Annotated[Array, "b t h 3 3"],
    v: Annotated[Array, "b s n e"],
    *,
    size: int | Sequence[int] = (3,),
    stride: int | Sequence[int] = (1,),
    grid: int | Sequence[int] | None = None,
    scale: float | None = None,
    segment_ids: Array | None = None,
    cu_seqlens: Array | Sequence[int] | None = None,
    lengths: Array | Sequence[int] | None = None,
    key_mask: Array | None = None,
    prefix: Array | Sequence[int] | None = None,
    attn_mask: Array | None = None,
    backend: BackendNames = None,
) -> Array:
    """Outlook attention (VOLO): softmax attention among the tokens of a window around each token.

    `Outlook`, built from its options and called. An optional input sets its own.
    Options: size, stride, grid, scale.
    """

def path(
    q: Annotated[Array, "b t h d"],
    k: Annotated[Array, "b s n d"],
    v: Annotated[Array, "b s n e"],
    *,
    w: Annotated[Array, "b s n d unit"],
    beta: Annotated[Array, "b s n in [0, 2]"],
    g: Annotated[Array, "b s h in (-inf, 0]"] = ...,
    scale: float | None = None,
    window: int | None = None,
    bias: bool | Annotated[Array, "1|b 1|h t s"] = False,
    forget: Literal["none", "unscaled", "scaled"] = "none",
    read: Literal["mean", "log_mean_exp", "mean_and_log_sum"] = "mean",
    flush: int = 1,
    segment_ids: Array | None = None,
    cu_seqlens: Array | Sequence[int] | None = None,
    lengths: Array | Sequence[int] | None = None,
    key_mask: Array | None = None,
    prefix: Array | Sequence[int] | None = None,
    attn_mask: Array | None = None,
    backend: BackendNames = None,
) -> Array:
    """PaTH: o = softmax(s A + bias) v, A_ij = q_iᵀ H_i … H_{j+1} k_j, H_t = I − β_t w_t w_tᵀ.

    `Path`, built from its options and called. An optional input sets its own.
    Options: scale, window, bias, forget, read, flush.
    """

def per_dim_scale(
    q: Annotated[Array, "b t h d"],
    k: Annotated[Array, "b s n d"],
    v: Annotated[Array, "b s n e"],
    *,
    per_dim: Annotated[Array, "d"],
    g: Annotated[Array, "b s h in (-inf, 0]"] = ...,
    slopes: Annotated[Array, "h in [0, inf)"] = ...,
    bucket_table: Annotated[Array, "32 h"] = ...,
    normalize: bool = True,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    bias: bool | Annotated[Array, "1|b 1|h t s"] = False,
    forget: Literal["none", "unscaled", "scaled"] = "none",
    read: Literal["mean", "log_mean_exp", "mean_and_log_sum"] = "mean",
    softcap: float | None = None,
    sink: bool | Annotated[Array, "h"] = False,
    distance: Literal["none", "slopes", "buckets"] = "none",
    buckets: int = 32,
    max_distance: int = 128,
    segment_ids: Array | None = None,
    cu_seqlens: Array | Sequence[int] | None = None,
    lengths: Array | Sequence[int] | None = None,
    key_mask: Array | None = None,
    prefix: Array | Sequence[int] | None = None,
    attn_mask: Array | None = None,
    backend: BackendNames = None,
) -> Array:
    """A learnt scale per query dimension: o = base(q ∘ softplus(p) / ln 2, k, v).

    `PerDimScale`, built from its options and called. An optional input sets its own.
    Options: normalize.
    Those of the softmax inside: causal, scale, window, bias, forget, read, softcap, sink, distance,
    buckets, max_distance.
    """

def qk_norm(
    q: Annotated[Array, "b t h d"],
    k: Annotated[Array, "b s n d"],
    v: Annotated[Array, "b s n e"],
    *,
    q_gain: Annotated[Array, "d"] = ...,
    k_gain: Annotated[Array, "d"] = ...,
    g: Annotated[Array, "b s h in (-inf, 0]"] = ...,
    slopes: Annotated[Array, "h in [0, inf)"] = ...,
    bucket_table: Annotated[Array, "32 h"] = ...,
    norm: Literal["rms", "layer", "l2"] = "rms",
    eps: float = 1e-06,
    gain: bool = False,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    bias: bool | Annotated[Array, "1|b 1|h t s"] = False,
    forget: Literal["none", "unscaled", "scaled"] = "none",
    read: Literal["mean", "log_mean_exp", "mean_and_log_sum"] = "mean",
    softcap: float | None = None,
    sink: bool | Annotated[Array, "h"] = False,
    distance: Literal["none", "slopes", "buckets"] = "none",
    buckets: int = 32,
    max_distance: int = 128,
    segment_ids: Array | None = None,
    cu_seqlens: Array | Sequence[int] | None = None,
    lengths: Array | Sequence[int] | None = None,
    key_mask: Array | None = None,
    prefix: Array | Sequence[int] | None = None,
    attn_mask: Array | None = None,
    backend: BackendNames = None,
) -> Array:
    """QK-norm: o = base(norm(q), norm(k), v).

    `QKNorm`, built from its options and called. An optional input sets its own.
    Options: norm, eps, gain.
    Those of the softmax inside: causal, scale, window, bias, forget, read, softcap, sink, distance,
    buckets, max_distance.
    """

def retention(
    q: Annotated[Array, "b t h d"],
    k: Annotated[Array, "b s n d"],
    v: Annotated[Array, "b s n e"],
    *,
    scale: float | None = None,
    segment_ids: Array | None = None,
    cu_seqlens: Array | Sequence[int] | None = None,
    lengths: Array | Sequence[int] | None = None,
    key_mask: Array | None = None,
    prefix: Array | Sequence[int] | None = None,
    attn_mask: Array | None = None,
    backend: BackendNames = None,
) -> Array:
    """Retention: o_i = s Σ_{j≤i} γ^{i−j} (q_i·k_j) v_j, with γ = 1 − 2^{−5−h} for query head h.

    `Retention`, built from its options and called. An optional input sets its own.
    Options: scale.
    """

def row_normalized(
    q: Annotated[Array, "b t h d"],
    k: Annotated[Array, "b s n d"],
    v: Annotated[Array, "b s n e"],
    *,
    g: Annotated[Array, "b s h in (-inf, 0]"] = ...,
    slopes: Annotated[Array, "h in [0, inf)"] = ...,
    bucket_table: Annotated[Array, "32 h"] = ...,
    eps: float = 1e-06,
    detach: bool = True,
    axis: Literal["auto", "token", "channel"] = "auto",
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    bias: bool | Annotated[Array, "1|b 1|h t s"] = False,
    forget: Literal["none", "unscaled", "scaled"] = "none",
    read: Literal["mean", "log_mean_exp", "mean_and_log_sum"] = "mean",
    softcap: float | None = None,
    sink: bool = False,
    distance: Literal["none", "slopes", "buckets"] = "none",
    buckets: int = 32,
    max_distance: int = 128,
    segment_ids: Array | None = None,
    cu_seqlens: Array | Sequence[int] | None = None,
    lengths: Array | Sequence[int] | None = None,
    key_mask: Array | None = None,
    prefix: Array | Sequence[int] | None = None,
    attn_mask: Array | None = None,
    backend: BackendNames = None,
) -> Array:
    """Rows of length 1: y = o / max(‖o‖, ε), with o = base(q, k, v), for each row and head.

    `RowNormalized`, built from its options and called. An optional input sets its own.
    Options: eps, detach, axis.
    Those of the softmax inside: causal, scale, window, bias, forget, read, softcap, sink, distance,
    buckets, max_distance.
    """

def rwkv6(
    q: Annotated[Array, "b t h d"],
    k: Annotated[Array, "b s n d"],
    v: Annotated[Array, "b s n e"],
    *,
    g: Annotated[Array, "b s n d in (-inf, 0]"],
    u: Annotated[Array, "h d"],
    scale: float | None = None,
    segment_ids: Array | None = None,
    cu_seqlens: Array | Sequence[int] | None = None,
    lengths: Array | Sequence[int] | None = None,
    key_mask: Array | None = None,
    prefix: Array | Sequence[int] | None = None,
    attn_mask: Array | None = None,
    backend: BackendNames = None,
) -> Array:
    """RWKV-6: o_i = s Σ_{j<i} Σ_c q_ic k_jc e^{g_{j+1,c} + … + g_{i−1,c}} v_j, and a bonus.

    `RWKV6`, built from its options and called. An optional input sets its own.
    Options: scale.
    """

def softmax(
    q: Annotated[Array, "b t h d"],
    k: Annotated[Array, "b s n d"],
    v: Annotated[Array, "b s n e"],
    *,
    g: Annotated[Array, "b s h in (-inf, 0]"] = ...,
    slopes: Annotated[Array, "h in [0, inf)"] = ...,
    bucket_table: Annotated[Array, "32 h"] = ...,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    bias: bool | Annotated[Array, "1|b 1|h t s"] = False,
    forget: Literal["none", "unscaled", "scaled"] = "none",
    read: Literal["mean", "log_mean_exp", "mean_and_log_sum"] = "mean",
    softcap: float | None = None,
    sink: bool | Annotated[Array, "h"] = False,
    distance: Literal["none", "slopes", "buckets"] = "none",
    buckets: int = 32,
    max_distance: int = 128,
    segment_ids: Array | None = None,
    cu_seqlens: Array | Sequence[int] | None = None,
    lengths: Array | Sequence[int] | None = None,
    key_mask: Array | None = None,
    prefix: Array | Sequence[int] | None = None,
    attn_mask: Array | None = None,
    backend: BackendNames = None,
) -> Array:
    """Softmax attention: o = softmax(s q kᵀ + bias + mask) v.

    `Softmax`, built from its options and called. An optional input sets its own.
    Options: causal, scale, window, bias, forget, read, softcap, sink, distance, buckets,
    max_distance.
    """

def ssd(
    q: Annotated[Array, "b t h d"],
    k: Annotated[Array, "b s h d"],
    v: Annotated[Array, "b s u e"],
    *,
    g: Annotated[Array, "b s u in (-inf, 0]"],
    scale: float | None = 1.0,
    segment_ids: Array | None = None,
    cu_seqlens: Array | Sequence[int] | None = None,
    lengths: Array | Sequence[int] | None = None,
    key_mask: Array | None = None,
    prefix: Array | Sequence[int] | None = None,
    attn_mask: Array | None = None,
    backend: BackendNames = None,
) -> Array:
    """Mamba-2's recurrence: o_i = s Σ_{j≤i} e^{g_{j+1} + … + g_i} (q_i·k_j) v_j.

    `SSD`, built from its options and called. An optional input sets its own.
    Options: scale.
    """

def stable_step(
    q: Annotated[Array, "b t h d"],
    k: Annotated[Array, "b s h d"],
    v: Annotated[Array, "b s u e"],
    *,
    g: Annotated[Array, "b s u in (-inf, 0]"],
    beta: Annotated[Array, "b s u in [0, inf)"],
    rule: Literal["implicit", "exact"] = "implicit",
    segment_ids: Array | None = None,
    cu_seqlens: Array | Sequence[int] | None = None,
    lengths: Array | Sequence[int] | None = None,
    key_mask: Array | None = None,
    prefix: Array | Sequence[int] | None = None,
    attn_mask: Array | None = None,
    backend: BackendNames = None,
) -> Array:
    """A delta rule that is stable for keys of any length: φ(c) β in place of β, with c = β ‖k‖².

    `StableStep`, built from its options and called. An optional input sets its own.
    Options: rule.
    """

def temperature(
    q: Annotated[Array, "b t h d"],
    k: Annotated[Array, "b s n d"],
    v: Annotated[Array, "b s n e"],
    *,
    tau: Annotated[Array, "in (0, inf) or h in (0, inf)"],
    g: Annotated[Array, "b s h in (-inf, 0]"] = ...,
    slopes: Annotated[Array, "h in [0, inf)"] = ...,
    bucket_table: Annotated[Array, "32 h"] = ...,
    per: Literal["layer", "head"] = "layer",
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    bias: bool | Annotated[Array, "1|b 1|h t s"] = False,
    forget: Literal["none", "unscaled", "scaled"] = "none",
    read: Literal["mean", "log_mean_exp", "mean_and_log_sum"] = "mean",
    softcap: float | None = None,
    sink: bool | Annotated[Array, "h"] = False,
    distance: Literal["none", "slopes", "buckets"] = "none",
    buckets: int = 32,
    max_distance: int = 128,
    segment_ids: Array | None = None,
    cu_seqlens: Array | Sequence[int] | None = None,
    lengths: Array | Sequence[int] | None = None,
    key_mask: Array | None = None,
    prefix: Array | Sequence[int] | None = None,
    attn_mask: Array | None = None,
    backend: BackendNames = None,
) -> Array:
    """A learnt temperature: logits s ⟨q, k⟩ / τ, where τ > 0 is an input `tau`.

    `Temperature`, built from its options and called. An optional input sets its own.
    Options: per.
    Those of the softmax inside: causal, scale, window, bias, forget, read, softcap, sink, distance,
    buckets, max_distance.
    """

def windowed(
    q: Annotated[Array, "b t h d"],
    k: Annotated[Array, "b s n d"],
    v: Annotated[Array, "b s n e"],
    *,
    bias_table: Annotated[Array, "7 h"] = ...,
    size: int | Sequence[int] = (4,),
    shift: int | Sequence[int] = (0,),
    grid: int | Sequence[int] | None = None,
    scale: float | None = None,
    bias: bool = False,
    read: Literal["mean", "log_mean_exp"] = "mean",
    segment_ids: Array | None = None,
    cu_seqlens: Array | Sequence[int] | None = None,
    lengths: Array | Sequence[int] | None = None,
    key_mask: Array | None = None,
    prefix: Array | Sequence[int] | None = None,
    attn_mask: Array | None = None,
    backend: BackendNames = None,
) -> Array:
    """Softmax attention within windows of a grid of tokens (Swin): not causal, no cache.

    `Windowed`, built from its options and called. An optional input sets its own.
    Options: size, shift, grid, scale, bias, read.
    """
