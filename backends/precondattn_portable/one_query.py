"""One query of each head, that attends to every cached token and to its own.

    S = s q Kᵀ,    o = softmax([S, s q·k]) [V; v],    or softmax(S) V with k and v among the cached

The cached keys and values are read where they are: nothing is masked, and nothing of their size is
written.
"""

from __future__ import annotations

from precondattn.arrays import Array, namespace
from precondattn.spec.array_functions import row_sum
from precondattn_portable.arithmetic import Arithmetic


def queries_by_key_head(q: Array, n: int) -> Array:
    """(b, 1, h, d) to (b, n, h / n, d): for one token a view."""
    b, _, h, d = q.shape
    return namespace(q).reshape(q, (b, n, h // n, d))


def attention_of_one(
    ops: Arithmetic, q: Array, k: Array, v: Array, keys: Array, values: Array
) -> Array:
    """Outputs (b, n, r, e) of scaled queries (b, n, r, d) and their own k, v (b, n, 1, …).

    Cached keys are Kᵀ (b, n, d, count), and values (b, n, count, e).
    """
    count = keys.shape[3]
    own = row_sum(q * k)
    scores = namespace(q).concat([ops.product(q, keys), own], axis=-1)
    weights = ops.softmax(scores)
    o = ops.product(weights[..., :count], values)
    return ops.add_multiple(o, weights[..., count:], v)


def attention_to_held(ops: Arithmetic, q: Array, keys: Array, values: Array) -> Array:
    """The same, if the query's own key and value are among the cached ones."""
    return ops.product(ops.softmax(ops.product(q, keys)), values)
