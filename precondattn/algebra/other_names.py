"""Names of other libraries: what to write here for their keywords and mechanisms.

They are no aliases: using one raises an error with the answer. `docs/coming_from.md` translates
whole calls.
"""

from __future__ import annotations

NO_DROPOUT = (
    "no mechanism drops weights: a dropped weight has no logarithm, and a state has no weights; "
    "leave it out, and drop entries of the output, with torch.nn.Dropout or nnx.Dropout"
)
KEYWORDS = {
    "q": "query inputs_q",
    "k": "key inputs_k",
    "v": "value inputs_v",
    "attn_mask=, True where a query may attend": "mask custom_mask src_mask",
    "bias= for numbers, causal=, window=, cu_seqlens= or lengths= for masks": "attn_bias",
    "causal=, window=, segment_ids=, lengths=, key_mask=, prefix= or attn_mask=": "block_mask",
    "bias=, slopes=, bucket_table=, softcap=, scale= or sink=": "score_mod",
    "causal=, an option of softmax, as in 'softmax[causal=false]'": "is_causal",
    "window=, an option of softmax, as in 'softmax[window=128]'": "window_size window_left "
    "local_window_size sliding_window",
    "scale=, an option, as in 'softmax[scale=0.1]'": "softmax_scale sm_scale scaling",
    "softcap=, an option of softmax, as in 'softmax[softcap=30.0]'": "logits_soft_cap",
    "slopes=, or 'softmax[distance=slopes]' in a layer": "alibi_slopes",
    "sink=, or 'softmax[sink=true]' in a layer": "s_aux add_zero_attn",
    "key_mask=, or mask= of a layer, True for tokens that count": "attention_mask "
    "key_padding_mask src_key_padding_mask",
    "lengths=, or mask= of a layer": "seq_lens query_seq_lengths key_value_seq_lengths",
    "cu_seqlens=, with b = 1": "cu_seqlens_q cu_seqlens_k cu_seqlens_cpu query_start_loc",
    "segment_ids=": "seq_idx",
    "g=, the logarithm of the decay": "gk g_gamma w A_log dt_bias lower_bound use_gate_in_kernel",
    "lam_mesa=": "lamb",
    "beta=, after its sigmoid": "use_beta_sigmoid_in_kernel allow_neg_eigval",
    "steps=, an option, as in 'delta_product[steps=2]'": "num_householder",
    "qk_norm around the mechanism, as in 'qk_norm[norm=l2](gated_delta)'": "qk_norm normalize_qk "
    "use_qk_l2norm_in_kernel",
    "a cache of init_cache, and extend": "past_key_values past_key_value use_cache kv_cache "
    "k_cache v_cache block_table block_tables cache_params decode inference_params",
    "states= of init_cache, and extend": "initial_state initial_states output_final_state "
    "return_final_states",
    "states_every= of extend": "return_intermediate_states",
    "capacity= of init_cache": "max_cache_len",
    "pa.with_lse": "return_lse return_aux return_residual return_softmax_lse",
    "pa.diagnostics.weights": "need_weights average_attn_weights output_attentions "
    "return_attn_probs",
    "backend=, or pa.use_backend": "implementation kernel_options op",
    "positions= of a layer; a mechanism takes rotated q and k": "position_ids cache_position "
    "position_embeddings rotary_cos rotary_sin",
    "width=": "embed_dim d_model hidden_size in_features",
    "heads=": "num_heads nhead num_attention_heads",
    "kv_heads= of a layer; k and v may have fewer heads than q": "num_kv_heads "
    "num_key_value_heads enable_gqa",
    "value_heads= of a layer": "num_v_heads",
    "head_dim= of a layer": "head_size d_state qkv_features expand_k",
    "value_dim= of a layer": "head_v_dim headdim expand_v",
    "hidden= of a Block": "intermediate_size dim_feedforward mlp_ratio",
    "layers= of a Decoder": "num_layers num_hidden_layers",
    "vocabulary= of a Decoder": "vocab_size",
    "depth= of a layer": "layer_idx",
    "recipes= of a layer, as in recipes={'out': Biased()}": "use_bias use_short_conv conv_size "
    "use_output_gate use_gate use_rope",
    "recipes={x: Rotary(theta=1e6) for x in 'qk'} of a layer": "rope_theta",
    "image= of a VisionTransformer": "img_size",
    "patch= of a VisionTransformer": "patch_size",
    "channels= of a VisionTransformer": "in_chans",
    "classes= of a VisionTransformer": "num_classes",
    "pool= of a VisionTransformer": "global_pool",
    "x, or tokens of a Decoder": "hidden_states input_ids",
    "nothing: the axes are always (b, t, h, d)": "batch_first head_first kv_layout",
    "nothing: positions have no limit": "max_position_embeddings max_seq_len",
    "nothing: it is not needed": "max_seqlen max_seqlen_q max_seqlen_k deterministic num_splits "
    "chunk_size mode fuse_norm return_dict safe_gate",
}

MECHANISMS = {
    "softmax": "sdpa scaled_dot_product_attention attention flash_attention flash_attention_2 "
    "flash_attn flash flex_attention eager multihead_attention self_attention mha gqa mqa",
    "softmax[window=128]": "swa sliding_window sliding_window_attention local_attention",
    "softmax[forget=unscaled]": "fox forgetting_transformer",
    "softmax[distance=slopes]": "alibi",
    "softmax[distance=buckets]": "t5",
    "linear": "linear_attn linear_attention linear_transformer",
    "retention": "retnet multiscale_retention",
    "ssd": "mamba2",
    "ssd[scale=none]": "simple_gla lightning_attn lightning_attention minimax",
    "gla": "gated_linear_attention",
    "gsa": "gated_slot_attention",
    "delta": "deltanet delta_net delta_rule",
    "gated_delta": "gdn gated_deltanet gated_delta_net gated_delta_rule qwen3_next",
    "kda": "kimi kimi_linear kimi_delta_attention",
    "delta_product": "gdp gated_delta_product gated_deltaproduct",
    "dplr": "rwkv7 dplr_delta_rule generalized_delta_rule",
    "atk": "pgdn precond_gated_delta precond_gated_delta_rule",
    "atk(kda)": "pkda precond_kda",
    "stable_step(delta)": "longhorn",
    "stable_step[rule=exact](delta)": "efla",
    "mesa": "mesanet mesa_net",
    "mlstm": "xlstm",
    "differential": "diff diff_attn diff_transformer differential_transformer",
    "cross_covariance": "xca xcit",
    "windowed": "swin swin_transformer",
    "outlook": "volo",
    "channel": "davit",
    "nystrom": "nystromformer",
}


def _by_name(table: dict[str, str]) -> dict[str, str]:
    return {name: answer for answer, names in table.items() for name in names.split()}


ANSWERS, EXPRESSIONS = _by_name(KEYWORDS), _by_name(MECHANISMS)


def is_dropout(name: str) -> bool:
    """Whether a keyword of another library is a dropout rate, such as `attn_pdrop`."""
    return "drop" in name


def keyword_elsewhere(name: str) -> str:
    """What to write in place of another library's keyword, in brackets; empty for other names."""
    if name in ANSWERS:
        return f" (here: {ANSWERS[name]})"
    return f" ({NO_DROPOUT})" if is_dropout(name) else ""


def in_our_spelling(name: str) -> str:
    """The name in lower case, with underscores."""
    return name.lower().replace("-", "_").replace(" ", "_")


def mechanism_elsewhere(name: str) -> str | None:
    """The expression for another library's name of a mechanism; None for any other name."""
    return EXPRESSIONS.get(in_our_spelling(name))
