"""Judgements of red cells, made by hand, in the order of the page.

Measured errors are not written here: `precondattn conformance --peer NAME` prints each, and code
that reproduces it.
"""

from __future__ import annotations

from precondattn_conformance.ecosystem.judgement import CONVENTIONAL, DEFECT, LIMIT, Judgement
from precondattn_conformance.peers.fla import OF_AN_OUTPUT

OF_A_CACHE = ("caching", "splits", "alternation", "cache_operations", "states")

JUDGEMENTS: tuple[Judgement, ...] = (
    Judgement(
        "ejkernel/recurrent",
        ("gradients", "future", "stability", "order_of_calls"),
        DEFECT,
        "The gradient by keys is wrong: the derivative that the function has itself multiplies "
        "the gradient of the state with values over the axis of keys. Outputs, and the gradients "
        "by queries and values, are right.",
    ),
    Judgement(
        "fla/kda_chunk fla/gdn2_chunk",
        ("gradients",),
        DEFECT,
        "Gradients of `naive_chunk_kda` and `naive_chunk_gdn2` are NaN where the gates of a "
        "chunk sum to less than −88: the decay between a token and a later one is e to a "
        "positive power, which overflows, and is masked afterwards. Their outputs are right.",
    ),
    Judgement(
        "fla/kda_chunk fla/gated_delta_chunk fla/gdn2_chunk fla/comba_chunk fla/simple_gla_chunk "
        "fla/simple_gla_parallel fla/dplr_chunk fla/rwkv6_chunk",
        ("stability",),
        DEFECT,
        "The decay between two tokens is a difference of cumulative sums of gates in float32, so "
        "that after a gate that forgets everything (−10,000), gates near 0 have lost their "
        "digits. It needs gates of thousands; recurrent forms of the same operations are right.",
    ),
    Judgement(
        "fla/forgetting_attn fla/attn_parallel_forget fla/path_forget",
        ("stability",),
        DEFECT,
        "What is added to a logit is a difference of cumulative sums of gates in float32: after "
        "a gate that forgets everything (−10,000), gates near 0 have lost their digits.",
    ),
    Judgement(
        "fla/comba_recurrent",
        (*OF_AN_OUTPUT, *OF_A_CACHE, "purity", "autocast"),
        DEFECT,
        "`naive_recurrent_comba` reads the state after its decay, where the paper, the chunked "
        "reference and the recurrent kernel read it before: the two references of one operation "
        "disagree.",
    ),
    Judgement(
        "fla/mesa_cg",
        OF_AN_OUTPUT,
        LIMIT,
        "A CG solver approximates the matrix inverse, as its comment says. It adds 1e-5 to both "
        "of its divisors, which are as small as |q|², so that short queries have the largest "
        "error.",
    ),
    Judgement(
        "maxtext/jax_chunk_gated_delta_rule maxtext/naive_jax_chunk_gated_delta_rule "
        "easydel/chunk_kda megatron/torch_chunk_gated_delta_rule "
        "gated-delta-net/chunk_gated_delta_rule_ref",
        ("stability",),
        DEFECT,
        "The decay between two tokens is a difference of cumulative sums of gates in float32, so "
        "that after a gate that forgets everything (−10,000), gates near 0 have lost their "
        "digits. It needs gates of thousands; forms of the same that go from token to token are "
        "right.",
    ),
    Judgement(
        "haiku/multi_head_attention",
        ("stability",),
        DEFECT,
        "Hidden logits are −1e30, so that a row whose visible logits are below it reads the "
        "future. Logits of this size are rare.",
    ),
    Judgement(
        "jax/pallas_gpu_mha_reference",
        ("stability",),
        DEFECT,
        "A row whose largest logit is beyond about ±10⁹ can be NaN on a CPU. The logits are "
        "scaled, and softmax subtracts their maximum: XLA computes both by one multiply-add, "
        "which does not round the product, while the maximum is of rounded products. Their "
        "difference is above 88, and its exponential overflows. Which shapes are compiled so "
        "depends on XLA; not compiled, it is right. Logits of this size are rare.",
    ),
    Judgement(
        "fast-transformers/recurrent_linear_attention performer/causal_linear_attention_noncuda",
        ("gradients",),
        LIMIT,
        "Sums over all tokens before are kept in the dtype of the inputs, which is bfloat16 "
        "here: 8 bits of a long sum. In float32 and float64, gradients are right.",
    ),
    Judgement(
        "lolcats/quadratic_attention",
        ("stability",),
        LIMIT,
        "In bfloat16, features of keys are summed in bfloat16: `fp32_attention=True` asks for "
        "more.",
    ),
    Judgement(
        "fast-transformers/full_attention xformers/ref_attention",
        ("gradients", "padding"),
        CONVENTIONAL,
        "A row that sees no key is NaN, as its masks are −∞ and are added: what a softmax of "
        "nothing is, is a matter of convention. The NaN reaches the gradients of other rows.",
    ),
    Judgement(
        "mamba/ssd_chunk_refs",
        ("stability", "threads"),
        DEFECT,
        "Gradients of the gates are NaN where those of a chunk sum to less than −88: "
        "`chunk_scan_ref` takes e to the power of differences above the diagonal too, where they "
        "are positive, and masks afterwards. Outputs are right, and no docstring promises "
        "gradients; `segsum` of the same project masks before.",
    ),
    Judgement(
        "xlstm/parallel_stabilized_simple xlstm/recurrent_step_stabilized_simple "
        "xlstm/chunkwise_simple",
        ("stability",),
        DEFECT,
        "Gradients are NaN where m, the largest sum of gates of a token, is below −88 in float32 "
        "(−709 in float64), as after one input gate of −89: the lower bound e^{−m} of the "
        "denominator overflows. Outputs are right.",
    ),
    Judgement(
        "mlstm_kernels/torch_parallel mlstm_kernels/torch_parallel_stable "
        "mlstm_kernels/torch_chunkwise mlstm_kernels/jax_parallel mlstm_kernels/jax_chunkwise",
        ("stability",),
        DEFECT,
        "Gradients are NaN where m, the largest sum of gates of a token, is below −88 in float32 "
        "(−709 in float64), as after one input gate of −89: the lower bound e^{−m} of the "
        "denominator overflows. The recurrent form is finite.",
    ),
    Judgement(
        "mlstm_kernels/torch_recurrent",
        ("stability",),
        LIMIT,
        "The logarithm of a forget gate is added to the running maximum, which has the dtype of "
        "the states, float32 by default: at input gates of 10⁴, it is rounded to 0.001. With "
        "`dtype_state=torch.float64` it is right; xLSTM's models cap gates at 15.",
    ),
    Judgement(
        "nystrom_attention/nystrom_attention",
        ("outputs", "gradients", "padding"),
        CONVENTIONAL,
        "The iteration for the inverse begins with the largest sums of all landmarks, masked "
        "ones included, and ours with those of visible ones. After its 6 steps this is seen; "
        "after 30, both are the same to rounding.",
    ),
    Judgement(
        "memory-efficient-attention/efficient_attention_torch_in_chunks",
        ("outputs", "threads"),
        DEFECT,
        "Keys count twice where their number is no multiple of `key_chunk_size`: the last chunk "
        "is moved back so that it is whole, and overlaps the one before it. With the default, "
        "4096, this needs more than 4096 keys.",
    ),
    Judgement(
        "memory-efficient-attention/efficient_attention_torch",
        ("outputs",),
        DEFECT,
        "Where there are more queries than `query_chunk_size` (1024), and they are no multiple "
        "of it, the output has more rows than there are queries: its docstring says `[batch..., "
        "q_length, num_heads, v_depth_per_head]`. The rows after the first chunk are those of "
        "other queries.",
    ),
    Judgement(
        "memory-efficient-attention-pytorch/cosine_sim_flash_attention",
        (
            "outputs",
            "gradients",
            "future",
            "stability",
            "dtypes",
            "determinism",
            "order_of_calls",
            "strides",
        ),
        DEFECT,
        "The sum of the weights of a block is taken as at least 1e-6, but a weight is e to the "
        "power of 16 (cos − 1), which is less than that for orthogonal vectors: such rows come "
        "out too small.",
    ),
    Judgement(
        "memory-efficient-attention-pytorch/memory_efficient_attention "
        "memory-efficient-attention-pytorch/flash_attention",
        ("outputs",),
        DEFECT,
        "With fewer queries than keys, causal queries see other keys than in `attention` of the "
        "same project, which aligns the last query with the last key, as our definition does. "
        "`memory_efficient_attention` aligns the first ones; `flash_attention` subtracts the "
        "difference of the lengths where it has to be added. A flag of one layer switches "
        "between `attention` and `memory_efficient_attention`.",
    ),
    Judgement(
        "flash-attention-jax/causal_flash_attention flash-attention-jax/masked_flash_attention",
        ("stability",),
        DEFECT,
        "The running maximum begins with −1e6, so that a row whose logits are all far below it "
        "has no weights, and is NaN or 0. Logits of this size are rare.",
    ),
    Judgement(
        "flash-attention-jax/causal_attention",
        ("stability",),
        DEFECT,
        "Hidden logits are −1e10, so that a row whose visible logits are below it reads the "
        "future. Logits of this size are rare.",
    ),
    Judgement(
        "memory-efficient-attention/efficient_attention_jax",
        ("gradients",),
        LIMIT,
        "In bfloat16 all of it is in bfloat16, also weights, their sums and quotients. The "
        "gradient of a query is a sum of keys whose weights cancel, so that rounding brings back "
        "what keys have in common. Outputs are right, and so is float32; its other red cases "
        "have rows that see no key, a convention below.",
    ),
    Judgement(
        "pytorch/sdpa_is_causal",
        ("outputs",),
        LIMIT,
        "With `is_causal=True` and fewer queries than keys, the first query is aligned with the "
        'first key. Its documentation says so ("upper left causal bias"); `causal_lower_right` '
        "aligns the last with the last.",
    ),
    Judgement(
        "timm/attention timm/diff_attention",
        ("gradients", "padding"),
        DEFECT,
        "With `fused_attn=False`, a row that sees no key is NaN, and so are gradients of the "
        "other rows of its sequence, as 0 times NaN is NaN. With `fused_attn=True` the row is 0, "
        "and gradients are right. The platform and an environment variable tell which of them "
        "runs.",
    ),
    Judgement(
        "transformers/llama_eager transformers/bert_eager transformers/gpt2_eager "
        "transformers/longt5_eager transformers/gemma2_eager transformers/mimo_v2_flash_eager "
        "transformers/diffllama",
        ("outputs", "gradients"),
        CONVENTIONAL,
        "A query that sees no key gets the mean of all values, and not 0: its mask is the lowest "
        "finite number in every place, which softmax does not see.",
    ),
    Judgement(
        "transformers/sdpa_attention",
        ("gradients",),
        DEFECT,
        "A query that sees no key is 0 without a position bias, and the mean of all values with "
        "one: `create_position_bias_mask` writes the lowest finite number where no key is "
        "visible, and its docstring says −∞.",
    ),
    Judgement(
        "transformers/kda_chunk transformers/gated_delta_chunk",
        ("stability",),
        DEFECT,
        "The decay between two tokens is a difference of cumulative sums of gates in float32, so "
        "that after a gate that forgets everything (−10,000), gates near 0 have lost their "
        "digits. It needs gates of thousands; the recurrent forms of the same operations are "
        "right.",
    ),
    Judgement(
        "transformers/xlstm_chunk transformers/xlstm_recurrent",
        ("stability",),
        LIMIT,
        "They are for gates that xLSTM has capped (`gate_soft_cap`, 15). At gates of thousands "
        "the running maximum, which adds logarithms of forget gates in float32, loses digits; "
        "and where all gates are below −88, gradients are NaN.",
    ),
    Judgement(
        "x_transformers/attend_causal",
        ("outputs", "gradients"),
        DEFECT,
        "With `causal=True` and a mask, a query whose visible keys are all masked returns the "
        "mean of all values, later ones too: whether a row is wholly masked is asked before "
        "causality is applied. With `flash=True`, such a row is 0.",
    ),
    Judgement(
        "x_transformers/attend_grouped",
        ("outputs", "gradients"),
        CONVENTIONAL,
        "Of h query heads and n key heads, query head i reads key head i mod n, and not ⌊i n / "
        "h⌋ as in the paper of grouped-query attention.",
    ),
)
