"""Extreme inputs, at which a correct formula overflows, underflows or loses all digits.

=============  ==================================================================================
huge_logits    queries and keys so long that e^⟨q, k⟩ overflows, or equally large logits as an
               input: softmax has to subtract a maximum
tied_logits    huge_logits with three distinct keys: several weights are equal, all others nearly 0
tiny_logits    queries and keys nearly 0: attention is a mean; a norm divides by almost 0
extreme_gates  decays of 1, almost 1, nearly 0 and 0, next to each other; β at its limits;
               input gates of which e^{i} overflows or is 0, with weights of one sign
far_values     values 100 apart: e^{v − max v} is 0 for most of them
far_segments   values around 100 and around −100, three tokens each: as in segments of a packed
               call, and in both signs beside the output of a padded query, which is 0
zero_rows      the first values are 0, and so are the first outputs, whose norm divides by ε
hidden_by_bias  biases of −∞, in one row for all keys: that query attends to no key; LASER's values
               are around 100
long_keys      keys whose squares overflow float16 in a norm, and queries shorter by the same factor
far_below      every logit of a row is below −10⁹ (−10³⁰ in float32 and float64), and one is far
               above the others: a finite number in place of masked logits would be larger
overwritten    a large value is written to a state and removed again, before anything is read
opposite_values  queries of 0, which average 64 values of 256, 64 of −256 and small ones (16 and −16
               in float32 and float64): a sum that is kept in half precision loses the small ones
=============  ==================================================================================

The result stays well conditioned: a correct computation is as accurate as on harmless inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import precondattn as pa
from precondattn.algebra.leaf_protocol import LeafProtocol
from precondattn.algebra.recurrences import Recurrences
from precondattn.arrays import Arrays
from precondattn.spec.laser import LOG_MEAN_EXP
from precondattn_conformance.harmless_keys import with_different_keys
from precondattn_conformance.inputs import CallLayout, make_inputs

SATURATED = ("huge_logits", "tied_logits")
EXTREMES = (
    *SATURATED,
    *("tiny_logits", "extreme_gates", "far_values", "far_segments", "zero_rows", "hidden_by_bias"),
    *("long_keys", "far_below"),
    *("overwritten", "opposite_values"),
)

HUGE = {"float64": 2000.0}
"""The size of the logits, by dtype: e^710 overflows in float64, e^89 in float32."""
HUGE_ELSEWHERE = 60.0
SCALED = 4.0
"""A factor for logits that are an input, since the mechanism multiplies them by a scale by
default."""
TINY = {"float64": 1e-8, "float32": 1e-6}
TINY_ELSEWHERE = 2.0**-5
JUMP = -9999.3
GATES = np.asarray([0.0, -0.03, -1e-4, -19.7, -0.47, JUMP, 0.0, -0.011, -3.3])
"""Logarithms of decays. No sum of several of them is exact in binary, so a decay that is computed
as a difference of cumulative sums has lost digits to the large terms."""
EDGE = 16
"""A block size of recurrences: blocks begin at multiples of it."""
OPENINGS = np.asarray([0.0, -1e4, 100.0, -3.0, 1e4, 9.0, 9990.0, -100.0])
"""Logarithms of input gates. After 10⁴ a token counts only if the state was forgotten."""
FAR = 50.0
STRONG = 1e4
"""The largest β for mechanisms without an upper limit."""
HIGH = {"float64": 800.0}
HIGH_ELSEWHERE = 100.0
"""The size of values whose exponentials overflow, by dtype."""
LARGE = 256.0
OPPOSITE = {"float16": 256.0, "bfloat16": 256.0}
OPPOSITE_ELSEWHERE = 16.0
"""The size of opposite values in float32 and float64: with 256, the rounding of the partial sums
alone exceeds float32's bound."""
CHUNK, LONGEST_CHUNK = 64, 128
"""The number of tokens in a chunk of a recurrence, in most kernels and in some."""
LONG = 512.0
"""The factor by which keys are lengthened: squares of numbers above 256 overflow float16."""
BELOW = {"float16": 2.0**14.5, "bfloat16": 2.0**15}
BELOW_ELSEWHERE = 2.0**51
"""The entries of queries and keys, by dtype. The logits are their squares times √d."""
FORWARD_ONLY = ("far_below", "opposite_values")
"""Kinds for which only outputs are compared. In the first, a gradient that keeps only the logarithm
of a row's sum can not be accurate, since the last bit of that is larger than 1. In the second,
gradients add no information."""
KEEP_A_SUM = Recurrences(
    rule=("add", "delta"), gate=(None, "head", "channel"), strength=(None, "scalar")
)
"""Recurrences whose state is a sum, so that a written value can be subtracted again."""


def makes_sense(mechanism: pa.Mechanism, kind: str) -> bool:
    """Whether this kind of input applies to the mechanism and is well conditioned."""
    inputs = mechanism.inputs
    leaves = mechanism.program.leaves
    if kind == "extreme_gates":
        has_gates = any(_is_gate(mechanism, name) for name in inputs)
        return has_gates and not _magnifies_a_solve(leaves)
    if kind == "hidden_by_bias":
        return "bias" in inputs and inputs["bias"].is_pairwise
    if kind == "overwritten":
        recurrence = mechanism.recurrence
        has_no_option = str(mechanism) == mechanism.name
        return has_no_option and recurrence is not None and recurrence in KEEP_A_SUM
    if kind == "opposite_values":
        return str(mechanism) == "softmax"
    if kind in ("far_values", "far_segments"):
        return _reads_exponentials(mechanism)
    if kind == "long_keys":
        if len(leaves) == 1 and not {"q", "k"} <= inputs.keys():
            return _is_norm(leaves[0])
        return {"q", "k"} <= inputs.keys() and not inputs["k"].unit and not _needs_short(leaves)
    if kind == "far_below":
        others = {"g", "bias", "contraction"} & inputs.keys()
        reads = _attends(mechanism) or any(isinstance(leaf, pa.Path) for leaf in leaves)
        return reads and not others and not _needs_short(leaves)
    if kind == "zero_rows":
        # A state or a solve would mix the large cotangents of these rows with those of others.
        is_local = all(isinstance(leaf, pa.Softmax | pa.TokenWise) for leaf in leaves)
        has_rows = any(isinstance(leaf, pa.UnitRows) and leaf.axis == "token" for leaf in leaves)
        return is_local and has_rows and "v" in inputs and not _reads_exponentials(mechanism)
    if kind == "huge_logits" and any(isinstance(leaf, pa.Channel | pa.Outlook) for leaf in leaves):
        return True
    attends = _attends(mechanism)
    if kind == "tiny_logits":
        return attends and not any(_is_not_tiny(leaf) for leaf in leaves)
    return attends


def at_an_extreme(mechanism: pa.Mechanism, layout: CallLayout, kind: str, dtype: str) -> Arrays:
    """The inputs of a mechanism at one of these extremes."""
    arrays = make_inputs(mechanism, layout, "duplicate" if kind == "tied_logits" else "random")
    arrays = with_different_keys(mechanism, arrays)
    if kind in ("huge_logits", "tied_logits", "tiny_logits"):
        factor = HUGE.get(dtype, HUGE_ELSEWHERE) ** 0.5
        if kind == "tiny_logits":
            factor = TINY.get(dtype, TINY_ELSEWHERE)
        for name in ("q", "k", "q2", "k2"):
            if name in arrays and not mechanism.inputs[name].unit:
                arrays[name] = factor * arrays[name]
        if "logits" in arrays:
            arrays["logits"] = SCALED * factor**2 * arrays["logits"]
    high = HIGH.get(dtype, HIGH_ELSEWHERE)
    if kind == "extreme_gates":
        for name, array in arrays.items():
            if _is_gate(mechanism, name):
                gates = np.resize(GATES, array.size).reshape(array.shape)
                arrays[name] = _with_jumps_at_edges(gates)
            elif name == "i":
                arrays[name] = np.resize(OPENINGS, array.size).reshape(array.shape)
                arrays |= {rows: np.abs(arrays[rows]) for rows in "qk"}
                # With nearly equal features, a mass near ε depends on how m is rounded.
                weights = [rows for rows in ("q_weight", "k_weight") if rows in arrays]
                arrays |= {rows: arrays[rows] / len(arrays[rows]) for rows in weights}
            elif name in ("beta", "lucid_beta"):
                pattern = mechanism.inputs[name]
                assert pattern.high is not None
                ends = pattern.low, min(pattern.high, STRONG)
                arrays[name].flat[::3], arrays[name].flat[1::3] = ends
    if kind == "hidden_by_bias":
        masked = np.random.default_rng(6).random(arrays["bias"].shape) < 0.3
        masked[..., -1, :] = True
        arrays["bias"] = np.where(masked, -np.inf, arrays["bias"])
        if _reads_exponentials(mechanism):
            arrays["v"] = arrays["v"] + high
    if kind in ("long_keys", "far_below"):
        by = LONG if kind == "long_keys" else BELOW.get(dtype, BELOW_ELSEWHERE)
        if "q" not in arrays:  # This is a norm without attention.
            name = "k" if "k" in arrays else "x"
            arrays[name] = by * arrays[name]
        for q, k in (("q", "k"), ("q2", "k2")):
            if {q, k} <= arrays.keys():
                _lengthen(arrays, q, k, by, is_far=kind == "far_below")
    if kind == "overwritten":
        _write_twice(arrays)
    if kind == "opposite_values":
        arrays["q"] = np.zeros_like(arrays["q"])
        by = OPPOSITE.get(dtype, OPPOSITE_ELSEWHERE)
        for start, value in ((16, by), (80, -by)):
            arrays["v"][:, start : start + 64] = value
    if kind == "far_values" and "v" in arrays:
        signs = np.sign(np.random.default_rng(5).normal(size=arrays["v"].shape))
        arrays["v"] = arrays["v"] + FAR * signs
    if kind == "zero_rows" and "v" in arrays:
        arrays["v"][:, :2] = 0
    if kind == "far_segments" and "v" in arrays:
        b, tokens = arrays["v"].shape[:2]
        segment = (np.arange(b)[:, None] + np.arange(tokens)) // 3
        sign = np.where(segment % 2 == 0, 1.0, -1.0)[:, :, None, None]
        arrays["v"] = arrays["v"] + high * sign
    return arrays


def _with_jumps_at_edges(gates: np.ndarray) -> np.ndarray:
    """Gates (b, s, heads, …) with a jump in the first token of a block, or in the last before it.

    In a cumulative sum within the block, either all terms or only the last one have lost digits.
    The two cases alternate between heads and blocks, since after a jump in the first token nothing
    that was written before the block is read.
    """
    for block, start in enumerate(range(EDGE, gates.shape[1], EDGE)):
        for head in range(gates.shape[2]):
            gates[:, start - (block + head) % 2, head] = JUMP
    return gates


def _reads_exponentials(mechanism: pa.Mechanism) -> bool:
    """Whether values are averaged as exponentials, as in LASER."""
    return any(getattr(leaf, "read", None) == LOG_MEAN_EXP for leaf in mechanism.program.leaves)


def _write_twice(arrays: Arrays) -> None:
    """Write values, then 256 times a value under a separate key, and later remove that one.

    Nothing else is written or read until the large value is removed and its chunk of 64 or 128
    tokens has ended. A state that is only rounded for a product loses the other values for that
    product only; a state that is kept in half precision loses them permanently. Keys are rows of a
    Hadamard matrix, whose products are exact, and queries do not read the large value's key.
    """
    b, tokens, n, d = arrays["k"].shape
    rows = np.asarray([[1.0]])
    while len(rows) < d:
        rows = np.block([[rows, rows], [rows, -rows]])
    first, again = tokens // 4, tokens // 2
    after = again + 1 if tokens <= CHUNK else -(-again // LONGEST_CHUNK) * LONGEST_CHUNK
    others, large = 1 + np.arange(tokens) % (d - 1), [first, again]
    others[large] = 0
    keys = (rows / d**0.5)[others]
    arrays["k"] = np.broadcast_to(keys[None, :, None], (b, tokens, n, d)).copy()
    first_key = keys[first]
    arrays["q"] = arrays["q"] - (arrays["q"] @ first_key)[..., None] * first_key
    arrays["q"][:, :after] = 0
    arrays["v"][:, first + 1 : after] = 0
    arrays["v"][:, first] *= LARGE
    if "g" in arrays:
        arrays["g"] = np.zeros_like(arrays["g"])
    if "beta" in arrays:
        arrays["beta"][:, first + 1 : after] = 0
        arrays["beta"][:, large] = 1.0
    else:
        arrays["v"][:, again] = -arrays["v"][:, first]


def _lengthen(arrays: Arrays, q: str, k: str, by: float, *, is_far: bool) -> None:
    """Lengthen keys and shorten queries by a factor, or give all keys one direction (`is_far`).

    With one direction, later keys are longer, and queries point against or along the keys, so that
    all weight is on the first visible key or on the last.
    """
    if not is_far:
        arrays[k], arrays[q] = by * arrays[k], arrays[q] / by
        return
    signs = np.where(np.arange(arrays[k].shape[-1]) % 3 == 0, -1.0, 1.0)
    queries, keys = (np.arange(arrays[n].shape[1])[:, None, None] for n in (q, k))
    arrays[k] = np.broadcast_to(by * signs * (1 + keys / 64), arrays[k].shape).copy()
    along = np.where(queries % 3 == 1, by, -by)
    arrays[q] = np.broadcast_to(along * signs, arrays[q].shape).copy()


def _attends(mechanism: pa.Mechanism) -> bool:
    leaves = mechanism.program.leaves
    is_softmax = any(isinstance(leaf, pa.Softmax | pa.Windowed) for leaf in leaves)
    return is_softmax and {"q", "k"} <= mechanism.inputs.keys()


def _is_norm(leaf: LeafProtocol) -> bool:
    """Whether the leaf normalises its rows or its keys, so that they may have any length."""
    norms = pa.RMSNorm | pa.LayerNorm | pa.L2Norm
    return isinstance(leaf, norms) or getattr(leaf, "normalize", None) == "keys"


def _magnifies_a_solve(leaves: Sequence[LeafProtocol]) -> bool:
    """Whether small rows of a ridge regression are divided by their length or a sum, or subtracted
    from each other. Where gates empty the state, the regression is accurate only relative to its
    largest row."""
    if not any(isinstance(leaf, pa.MesaQuery) for leaf in leaves):
        return False
    recurrences = (leaf.recurrence for leaf in leaves if isinstance(leaf, pa.LinearFamily))
    divides = any(each is not None and each.normaliser for each in recurrences)
    return divides or any(isinstance(leaf, pa.UnitRows | pa.Difference) for leaf in leaves)


def _needs_short(leaves: Sequence[LeafProtocol]) -> bool:
    """Whether long keys overflow in a feature map, or make a covariance ill-conditioned."""
    kinds = (
        pa.EluPlusOne | pa.HedgehogMap | pa.ConditionedQuery | pa.QueryWeightedQuery | pa.MesaQuery
    )
    return any(isinstance(leaf, kinds) for leaf in leaves)


def _is_not_tiny(leaf: LeafProtocol) -> bool:
    """Whether the leaf maps inputs that are nearly 0 to features, or equal inputs to a constant."""
    is_by_channel = getattr(leaf, "axis", "") == "channel"
    return is_by_channel or isinstance(leaf, pa.EluPlusOne | pa.HedgehogMap)


def _is_gate(mechanism: pa.Mechanism, name: str) -> bool:
    """Whether an input is the logarithm of a decay."""
    pattern = mechanism.inputs[name]
    return name == "g" and pattern.high == 0
