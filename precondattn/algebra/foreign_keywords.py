"""Keywords of other libraries, with the equivalent in this library.

A foreign keyword is not an alias: it raises an error, which names the equivalent. Keywords are
sorted by library; a keyword that several libraries have is listed under the first.

An answer is words, code or both. A test executes all code. In it, a variable with the keyword's
name is the given value; `attn` is the mechanism, `layer` a layer, and `model` a Decoder. Code such
as `heads=num_heads` is another keyword of the same call.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

CALL, LAYER, MODEL = "call", "layer", "model"
"""The places of a keyword: a call of a mechanism; a layer, block or vision model; a Decoder."""


class Said(NamedTuple):
    """The equivalent in this library, in words and in code."""

    words: str = ""
    code: str = ""

    def __str__(self) -> str:
        return ": ".join(filter(None, self))


class KeywordAnswer(NamedTuple):
    """The equivalents of a keyword of another library, by the place where it is given."""

    call: Said
    """The answer for a call of a mechanism, or for its options."""
    layer: Said | None = None
    """The answer for a layer, if it differs."""
    model: Said | None = None
    """The answer for a Decoder, if it differs from the answer for a layer."""

    def at(self, place: str) -> Said:
        if place == MODEL and self.model is not None:
            return self.model
        said = self.call if place == CALL or self.layer is None else self.layer
        return of_each_layer(said) if place == MODEL else said


OF_ATTENTION = ("kv_heads", "value_heads", "head_dim", "value_dim", "slots", "recipes")
"""The keywords of a layer that a Decoder accepts for each of its layers."""


def of_each_layer(said: Said) -> Said:
    """The answer for a layer, rewritten for a Decoder."""
    names = re.findall(r"(?:^|, )(\w+)=", said.code)
    if not set(names) & set(OF_ATTENTION):
        return said
    mechanism = "" if "mechanism" in names else "mechanism='lucid', "
    return Said(said.words, f"layers=[dict({mechanism}{said.code})] * 2")


NO_DROPOUT = (
    "no mechanism drops weights: a dropped weight has no logarithm, and a state has no weights; "
    "leave it out, and drop entries of the output, with torch.nn.Dropout or nnx.Dropout"
)
DROPOUT = KeywordAnswer(Said(NO_DROPOUT))
NOT_NEEDED = KeywordAnswer(Said("leave it out: it is not needed"))
LAYOUT = Said("leave it out: the axes are always (b, t, h, d)")
CACHED = KeywordAnswer(
    Said(
        "",
        "cache = attn.init_cache(q, k, v, capacity=4096); out, cache = attn.extend(cache, q, k, v)",
    ),
    Said("", "cache = layer.init_cache(batch, capacity=4096); y, cache = layer(x, cache=cache)"),
    Said(
        "",
        "caches = model.init_caches(batch, capacity=4096); "
        "logits, caches = model(tokens, caches=caches)",
    ),
)
WEIGHTS = KeywordAnswer(
    Said("", "pa.diagnostics.weights(attn, q, k, v)"),
    Said("weights are of a mechanism", "pa.diagnostics.weights(attn, q, k, v)"),
)
LOG_SUM_EXP = KeywordAnswer(Said("", "out, lse = pa.with_lse(attn, q, k, v)"))
ARRAYS = Said("widths are those of the arrays")
SELF_ATTENTION = Said("a layer makes keys and values of x; for others call the mechanism")
GROUPED = Said("leave it out: k and v may have fewer heads than q")
IS_Q, IS_K, IS_V = (KeywordAnswer(Said(f"it is {name}")) for name in "qkv")
NO_LIMIT = KeywordAnswer(
    Said("leave it out: positions have no limit, and a cache has its capacity")
)
BACKEND = KeywordAnswer(
    Said("backend= says who computes", "attn(q, k, v, backend='reference')"),
    Said("", "with pa.use_backend('reference'): layer(x)"),
    Said("", "with pa.use_backend('reference'): model(tokens)"),
)
POSITIONS = KeywordAnswer(
    Said("positions are counted from the cache's length; give rotated q and k"),
    Said("positions (t,) or (b, t) are counted by default", "layer(x, positions=positions)"),
    Said("leave it out: positions are counted, from the caches' length on"),
)
LOG_DECAY = KeywordAnswer(
    Said(
        "g is the logarithm of the decay",
        "g = -A_log.exp() * torch.nn.functional.softplus(g + dt_bias)",
    ),
    Said("leave it out: the recipe of g has it, as print(layer) shows"),
)
RECIPES = "with recipes of precondattn.layers.recipes"
OF_LAYERS = Said("it is of layers")
OF_DECODER = Said("it is of a Decoder")
HEADS = Said("heads are an axis of q: (b, t, h, d)")


def scale_by(name: str) -> KeywordAnswer:
    return KeywordAnswer(
        Said("", f"pa.Softmax(scale={name})(q, k, v)"),
        Said("", "mechanism='softmax[scale=0.1]'"),
    )


def window_of(value: str) -> KeywordAnswer:
    return KeywordAnswer(
        Said(
            "window is the number of tokens with the query's own, of softmax",
            f"pa.Softmax(window={value})(q, k, v)",
        ),
        Said("", "mechanism='softmax[window=128]'"),
    )


def capped_by(name: str) -> KeywordAnswer:
    return KeywordAnswer(
        Said("", f"pa.Softmax(softcap={name})(q, k, v)"),
        Said("", "mechanism='softmax[softcap=30.0]'"),
    )


def packed_by(name: str) -> KeywordAnswer:
    return KeywordAnswer(
        Said("with b = 1, q of shape (1, total, h, d)", f"attn(q, k, v, cu_seqlens={name})"),
        Said("with b = 1", f"layer(x, cu_seqlens={name})"),
        Said("with b = 1", f"model(tokens, cu_seqlens={name})"),
    )


def lengths_are(name: str) -> KeywordAnswer:
    return KeywordAnswer(
        Said("", f"attn(q, k, v, lengths={name})"),
        Said("True for valid tokens and False for padding", "layer(x, mask=mask)"),
        Said("True for valid tokens and False for padding", "model(tokens, mask=mask)"),
    )


def valid_where(condition: str) -> KeywordAnswer:
    """The answer for a mask of tokens (b, s) that is true where the condition holds."""
    return KeywordAnswer(
        Said("True for keys that count, (b, s)", f"attn(q, k, v, key_mask={condition})"),
        Said("True for tokens, (b, t)", f"layer(x, mask={condition})"),
        Said("True for tokens, (b, t)", f"model(tokens, mask={condition})"),
    )


def pairs_of(name: str) -> KeywordAnswer:
    """The answer for a mask of pairs of tokens with this name."""
    words = "True where a query may attend, (b or 1, h or 1, t, s), for softmax"
    return KeywordAnswer(
        Said(f"{words}; a mask of numbers is bias=", f"pa.softmax(q, k, v, attn_mask={name})"),
        Said(words, f"layer(x, attn_mask={name})"),
        Said(words, f"model(tokens, attn_mask={name})"),
    )


def slopes_are(name: str) -> KeywordAnswer:
    return KeywordAnswer(
        Said("", f"pa.softmax(q, k, v, slopes={name})"),
        Said("", "mechanism='softmax[distance=slopes]'"),
    )


def sized(keyword: str, words: Said = ARRAYS) -> KeywordAnswer:
    """The answer for a size that a layer gets by another keyword."""
    return KeywordAnswer(words, Said("", keyword))


KeywordAnswers = dict[str, KeywordAnswer]

KEYWORDS: dict[str, KeywordAnswers] = {
    "PyTorch's scaled_dot_product_attention": {
        "query": IS_Q,
        "key": IS_K,
        "value": IS_V,
        "attn_mask": pairs_of("attn_mask"),
        "dropout_p": DROPOUT,
        "is_causal": KeywordAnswer(
            Said(
                "causal is an option of softmax, true by default; recurrences are causal",
                "pa.Softmax(causal=False)(q, k, v)",
            ),
            Said("causality is the mechanism's", "mechanism='softmax[causal=false]'"),
        ),
        "enable_gqa": KeywordAnswer(GROUPED, Said("", "kv_heads=2")),
    },
    "PyTorch's FlexAttention": {
        "score_mod": KeywordAnswer(
            Said(
                "inputs and options of softmax change scores, such as bias=, slopes=, "
                "bucket_table=, softcap=, scale=, sink=",
                "pa.softmax(q, k, v, slopes=slopes, softcap=30.0)",
            ),
            Said("options of softmax change scores", "mechanism='softmax[distance=slopes]'"),
        ),
        "block_mask": KeywordAnswer(
            Said(
                "masks are causal= and window= of softmax, and of a call segment_ids=, lengths=, "
                "key_mask=, prefix=, attn_mask=",
                "pa.softmax(q, k, v, window=128, segment_ids=segment_ids)",
            ),
            Said(
                "segment_ids=, mask=, prefix= and attn_mask= of a call, and",
                "mechanism='softmax[window=128]'",
            ),
        ),
        "kernel_options": BACKEND,
        "return_lse": LOG_SUM_EXP,
        "return_aux": LOG_SUM_EXP,
    },
    "PyTorch's MultiheadAttention": {
        "embed_dim": sized("width=embed_dim"),
        "num_heads": sized("heads=num_heads", HEADS),
        "kdim": KeywordAnswer(ARRAYS, SELF_ATTENTION),
        "vdim": KeywordAnswer(ARRAYS, SELF_ATTENTION),
        "dropout": DROPOUT,
        "batch_first": KeywordAnswer(LAYOUT, Said("leave it out: x is always (b, t, width)")),
        "add_zero_attn": KeywordAnswer(
            Said("a sink of logit 0 does it", "pa.softmax(q, k, v, sink=torch.zeros(q.shape[2]))"),
            Said("a learned sink does it", "mechanism='softmax[sink=true]'"),
        ),
        "key_padding_mask": valid_where("~key_padding_mask"),
        "need_weights": WEIGHTS,
        "average_attn_weights": WEIGHTS,
    },
    "PyTorch's TransformerEncoderLayer": {
        "d_model": sized("width=d_model"),
        "nhead": sized("heads=nhead", HEADS),
        "dim_feedforward": sized("hidden=dim_feedforward", Said("it is of a Block")),
        "src_key_padding_mask": valid_where("~src_key_padding_mask"),
        "src_mask": pairs_of("~src_mask[None, None]"),
        "num_layers": KeywordAnswer(
            OF_DECODER, OF_DECODER, Said("", "layers=num_layers, mechanism='lucid'")
        ),
    },
    "JAX's dot_product_attention": {
        "mask": KeywordAnswer(
            pairs_of("mask").call,
            Said("True for tokens, (b, t)", "layer(x, mask=mask)"),
            Said("True for tokens, (b, t)", "model(tokens, mask=mask)"),
        ),
        "query_seq_lengths": lengths_are("query_seq_lengths"),
        "key_value_seq_lengths": lengths_are("key_value_seq_lengths"),
        "local_window_size": window_of("local_window_size + 1"),
        "implementation": BACKEND,
        "return_residual": LOG_SUM_EXP,
    },
    "Flax's MultiHeadAttention": {
        "in_features": sized("width=in_features"),
        "qkv_features": sized("head_dim=qkv_features // heads"),
        "out_features": KeywordAnswer(ARRAYS, Said("the output of a layer is as wide as x")),
        "num_kv_heads": KeywordAnswer(GROUPED, Said("", "kv_heads=num_kv_heads")),
        "inputs_q": KeywordAnswer(Said("it is q"), Said("", "layer(inputs_q)")),
        "inputs_k": KeywordAnswer(Said("it is k"), SELF_ATTENTION),
        "inputs_v": KeywordAnswer(Said("it is v"), SELF_ATTENTION),
        "dropout_rate": DROPOUT,
        "use_bias": KeywordAnswer(OF_LAYERS, Said(RECIPES, "recipes={'out': Biased()}")),
        "normalize_qk": KeywordAnswer(
            Said("", "pa.QKNorm(pa.Softmax())(q, k, v)"), Said("", "mechanism='qk_norm'")
        ),
        "decode": CACHED,
    },
    "flash-attention": {
        "qkv": KeywordAnswer(Said("", "attn(*qkv.unbind(2))")),
        "softmax_scale": scale_by("softmax_scale"),
        "window_size": window_of("window_size[0] + 1"),
        "alibi_slopes": slopes_are("alibi_slopes"),
        "cu_seqlens_q": packed_by("cu_seqlens_q"),
        "cu_seqlens_k": packed_by("cu_seqlens_k"),
        "max_seqlen_q": NOT_NEEDED,
        "max_seqlen_k": NOT_NEEDED,
        "max_seqlen": NOT_NEEDED,
        "deterministic": NOT_NEEDED,
        "num_splits": NOT_NEEDED,
        "return_attn_probs": WEIGHTS,
        "return_softmax_lse": LOG_SUM_EXP,
        "k_cache": CACHED,
        "v_cache": CACHED,
        "cache_seqlens": KeywordAnswer(
            Said("cache.length has them, of a cache from init_cache", "cache.length"),
            Said("cache.length has them, of a cache from init_cache"),
        ),
        "rotary_cos": POSITIONS,
        "rotary_sin": POSITIONS,
    },
    "vLLM and FlashInfer": {
        "head_size": sized("head_dim=head_size"),
        "sm_scale": scale_by("sm_scale"),
        "logits_soft_cap": capped_by("logits_soft_cap"),
        "window_left": window_of("window_left + 1"),
        "custom_mask": pairs_of("custom_mask"),
        "seq_lens": lengths_are("seq_lens"),
        "query_start_loc": packed_by("query_start_loc"),
        "kv_layout": KeywordAnswer(LAYOUT),
        "kv_cache": CACHED,
        "block_table": CACHED,
        "block_tables": CACHED,
        "attn_metadata": CACHED,
    },
    "xformers": {
        "attn_bias": KeywordAnswer(
            Said(
                "a tensor is bias=; LowerTriangularMask() is the default, a local mask is window=, "
                "a block-diagonal one cu_seqlens=, padding lengths=",
                "pa.softmax(q, k, v, bias=attn_bias)",
            ),
            Said("segment_ids= and mask= of a call, and", "mechanism='softmax[window=128]'"),
        ),
        "p": DROPOUT,
        "op": BACKEND,
    },
    "flash-linear-attention": {
        "initial_state": KeywordAnswer(
            Said(
                "",
                "cache = attn.init_cache(q, k, v, states={'S': initial_state}); "
                "out, cache = attn.extend(cache, q, k, v)",
            ),
            *CACHED[1:],
        ),
        "output_final_state": KeywordAnswer(
            Said(
                "",
                "cache = attn.init_cache(q, k, v); out, cache = attn.extend(cache, q, k, v); "
                "final_state = cache.states['S']",
            ),
            *CACHED[1:],
        ),
        "return_intermediate_states": KeywordAnswer(
            Said(
                "cache.crop(n) goes back to one",
                "cache = attn.init_cache(q, k, v, capacity=4096); "
                "out, cache = attn.extend(cache, q, k, v, states_every=64)",
            ),
            Said(
                "cache.crop(n) goes back to one",
                "cache = layer.init_cache(batch, capacity=4096); "
                "y, cache = layer(x, cache=cache, states_every=64)",
            ),
            Said(
                "crop of each cache goes back to one",
                "caches = model.init_caches(batch, capacity=4096); "
                "logits, caches = model(tokens, caches=caches, states_every=64)",
            ),
        ),
        "use_qk_l2norm_in_kernel": KeywordAnswer(
            Said("", "pa.QKNorm(pa.GatedDelta(), norm='l2')(q, k, v, g=g, beta=beta)"),
            Said("leave it out: the recipes of q and k do it, as print(layer) shows"),
        ),
        "use_gate_in_kernel": LOG_DECAY,
        "A_log": LOG_DECAY,
        "dt_bias": LOG_DECAY,
        "lower_bound": KeywordAnswer(
            Said(
                "g is the logarithm of the decay",
                "g = lower_bound * torch.sigmoid(A_log.exp() * (g + dt_bias))",
            ),
            LOG_DECAY.layer,
        ),
        "safe_gate": NOT_NEEDED,
        "use_beta_sigmoid_in_kernel": KeywordAnswer(
            Said("", "beta = torch.sigmoid(beta)"),
            Said("leave it out: the recipe of beta does it, as print(layer) shows"),
        ),
        "allow_neg_eigval": KeywordAnswer(
            Said("beta may be up to 2", "beta = 2 * torch.sigmoid(beta)"),
            Said(RECIPES, "mechanism='delta', recipes={'beta': Sigmoid(2.0)}"),
        ),
        "head_first": KeywordAnswer(LAYOUT),
        "state_v_first": KeywordAnswer(Said("leave it out: a state is always (b, h, d, e)")),
        "transpose_state_layout": KeywordAnswer(
            Said("leave it out: a state is always (b, h, d, e)")
        ),
        "gk": KeywordAnswer(Said("", "pa.gla(q, k, v, g=gk)")),
        "r": KeywordAnswer(Said("it is q, of RWKV"), SELF_ATTENTION),
        "w": KeywordAnswer(
            Said("of RWKV it is g, the logarithm of the decay", "pa.rwkv6(q, k, v, g=w, u=u)"),
            LOG_DECAY.layer,
        ),
        "g_gamma": KeywordAnswer(
            Said("", "pa.ssd(q, k, v, g=g_gamma.expand(q.shape[:3]), scale=None)"),
            Said("retention has fixed decays", "mechanism='retention'"),
        ),
        "num_householder": KeywordAnswer(
            Said("steps is an option", "pa.DeltaProduct(steps=num_householder)"),
            Said("", "mechanism='delta_product[steps=2]'"),
        ),
        "lamb": KeywordAnswer(
            Said("", "pa.mesa(q, k, v, g=g, lam_mesa=lamb)"), Said("", "mechanism='mesa'")
        ),
        "chunk_size": NOT_NEEDED,
        "chunk_indices": NOT_NEEDED,
        "disable_recompute": NOT_NEEDED,
        "mode": NOT_NEEDED,
        "fuse_norm": NOT_NEEDED,
        "cu_seqlens_cpu": packed_by("cu_seqlens_cpu"),
        "use_short_conv": KeywordAnswer(
            OF_LAYERS, Said(RECIPES, "recipes={x: Projection() for x in 'qkv'}")
        ),
        "conv_size": KeywordAnswer(
            OF_LAYERS, Said(RECIPES, "recipes={'v': Convolution(size=conv_size)}")
        ),
        "use_output_gate": KeywordAnswer(OF_LAYERS, Said(RECIPES, "recipes={'out': GatedNorm()}")),
        "use_gate": KeywordAnswer(OF_LAYERS, Said(RECIPES, "recipes={'out': GatedNorm()}")),
        "qk_norm": KeywordAnswer(
            Said("", "pa.QKNorm(pa.Softmax())(q, k, v)"), Said("", "mechanism='qk_norm'")
        ),
        "expand_k": sized("head_dim=int(expand_k * width) // heads"),
        "expand_v": sized("value_dim=int(expand_v * width) // heads"),
        "num_v_heads": sized("value_heads=num_v_heads, mechanism='gated_delta'", HEADS),
        "head_v_dim": sized("value_dim=head_v_dim"),
        "layer_idx": KeywordAnswer(OF_LAYERS, Said("", "depth=layer_idx"), Said("leave it out")),
    },
    "Transformers": {
        "attention_mask": valid_where("attention_mask != 0"),
        "past_key_values": CACHED,
        "past_key_value": CACHED,
        "cache_params": CACHED,
        "cache": CACHED,
        "use_cache": CACHED,
        "cache_position": POSITIONS,
        "position_ids": POSITIONS,
        "position_embeddings": POSITIONS,
        "output_attentions": WEIGHTS,
        "return_dict": NOT_NEEDED,
        "max_cache_len": KeywordAnswer(
            Said("", "attn.init_cache(q, k, v, capacity=max_cache_len)"),
            Said("", "layer.init_cache(batch, capacity=max_cache_len)"),
            Said("", "model.init_caches(batch, capacity=max_cache_len)"),
        ),
        "max_batch_size": KeywordAnswer(
            Said("it is that of q, k and v", "attn.init_cache(q, k, v, capacity=4096)"),
            Said("", "layer.init_cache(max_batch_size, capacity=4096)"),
            Said("", "model.init_caches(max_batch_size, capacity=4096)"),
        ),
        "batch_size": KeywordAnswer(
            Said("it is that of q, k and v", "attn.init_cache(q, k, v, capacity=4096)"),
            Said("", "layer.init_cache(batch_size, capacity=4096)"),
            Said("", "model.init_caches(batch_size, capacity=4096)"),
        ),
        "hidden_states": KeywordAnswer(
            Said("a mechanism takes q, k and v"),
            Said("", "layer(hidden_states)"),
            Said("a Decoder takes tokens", "model(tokens)"),
        ),
        "input_ids": KeywordAnswer(
            Said("a mechanism takes q, k and v"),
            Said("a layer takes hidden states", "layer(x)"),
            Said("tokens are the first argument", "model(input_ids)"),
        ),
        "labels": KeywordAnswer(
            OF_DECODER,
            OF_DECODER,
            Said(
                "",
                "logits = model(tokens[:, :-1]); loss = torch.nn.functional.cross_entropy("
                "logits.flatten(0, 1), labels[:, 1:].flatten())",
            ),
        ),
        "hidden_size": sized("width=hidden_size"),
        "num_attention_heads": sized("heads=num_attention_heads", HEADS),
        "num_key_value_heads": KeywordAnswer(GROUPED, Said("", "kv_heads=num_key_value_heads")),
        "num_hidden_layers": KeywordAnswer(
            OF_DECODER, OF_DECODER, Said("", "layers=num_hidden_layers, mechanism='lucid'")
        ),
        "vocab_size": KeywordAnswer(OF_DECODER, OF_DECODER, Said("", "vocabulary=vocab_size")),
        "intermediate_size": sized("hidden=intermediate_size", Said("it is of a Block")),
        "max_position_embeddings": NO_LIMIT,
        "max_seq_len": NO_LIMIT,
        "rope_theta": KeywordAnswer(
            Said("give rotated q and k"),
            Said(RECIPES, "recipes={x: Rotary(theta=rope_theta) for x in 'qk'}"),
        ),
        "use_rope": KeywordAnswer(
            Said("give rotated q and k"),
            Said(RECIPES, "recipes={x: Projection() for x in 'qk'}"),
        ),
        "max_new_tokens": KeywordAnswer(
            OF_DECODER, OF_DECODER, Said("", "model.generate(tokens, max_new_tokens)")
        ),
        "max_length": KeywordAnswer(
            OF_DECODER,
            OF_DECODER,
            Said(
                "count is the number of new tokens",
                "model.generate(tokens, max_length - tokens.shape[1])",
            ),
        ),
        "do_sample": KeywordAnswer(
            OF_DECODER,
            OF_DECODER,
            Said(
                "temperature 0, the default, is greedy",
                "model.generate(tokens, 8, temperature=1.0)",
            ),
        ),
        "top_k": KeywordAnswer(
            OF_DECODER,
            OF_DECODER,
            Said(
                "top_p keeps the most probable tokens",
                "model.generate(tokens, 8, temperature=1.0, top_p=0.9)",
            ),
        ),
        "eos_token_id": KeywordAnswer(
            OF_DECODER, OF_DECODER, Said("", "model.generate(tokens, 8, stop=eos_token_id)")
        ),
        "pad_token_id": KeywordAnswer(
            OF_DECODER, OF_DECODER, Said("leave it out: after its stop a sequence repeats that")
        ),
        "sliding_window": window_of("sliding_window"),
        "scaling": scale_by("scaling"),
    },
    "timm": {
        "img_size": sized("image=img_size"),
        "patch_size": sized("patch=patch_size"),
        "in_chans": sized("channels=in_chans"),
        "num_classes": sized("classes=num_classes"),
        "mlp_ratio": sized("hidden=int(mlp_ratio * width)", Said("it is of a Block")),
        "global_pool": sized("pool='mean'"),
        "pixel_values": sized("model(pixel_values)"),
    },
    "mamba-ssm": {
        **dict.fromkeys(
            ("A", "B", "C", "D", "dt"), KeywordAnswer(Said("", "pa.mamba2(x, dt, A, B, C)"))
        ),
        "d_state": sized("head_dim=d_state"),
        "headdim": sized("value_dim=headdim"),
        "seq_idx": KeywordAnswer(
            Said("", "attn(q, k, v, segment_ids=seq_idx)"),
            Said("", "layer(x, segment_ids=seq_idx)"),
            Said("", "model(tokens, segment_ids=seq_idx)"),
        ),
        "initial_states": CACHED,
        "return_final_states": CACHED,
        "inference_params": CACHED,
    },
}


def is_dropout(name: str) -> bool:
    """Whether a keyword of another library is a dropout rate, such as `attn_pdrop`."""
    return "drop" in name


def call_of(inputs: Iterable[str]) -> str:
    """The arguments of a call: the first three inputs by position, and the others by name."""
    return ", ".join(name if i < 3 else f"{name}={name}" for i, name in enumerate(inputs))


def keyword_elsewhere(name: str, place: str = CALL, inputs: Iterable[str] = "qkv") -> str:
    """The equivalent of another library's keyword, in brackets; empty for any other name.

    `inputs` are the inputs of the mechanism that was called.
    """
    for library, answers in KEYWORDS.items():
        if name in answers:
            words, code = answers[name].at(place)
            if "attn" in code:
                code = code.replace("q, k, v", call_of(inputs))
            return f" (of {library}; here: {Said(words, code)})"
    return f" ({NO_DROPOUT})" if is_dropout(name) else ""
