"""How many times plain attention's time a row takes, at each number of tokens.

Plain attention is PyTorch's `scaled_dot_product_attention`, the peer `sdpa`. Where it is a peer of
the row, the ratio is that of the rounds in turns. Other rows are compared with its time beside
`softmax`, in the same run at the same sizes.
"""

from __future__ import annotations

from collections import defaultdict

from precondattn_conformance.bench.record import Row

PLAIN = "sdpa"

Curves = dict[str, dict[str, list[tuple[int, float]]]]
"""Numbers of tokens and ratios, by work and mechanism (with its library, if there are several)."""


def ratios_to_plain(rows: list[Row]) -> Curves:
    """The curves of all rows that can be compared."""
    plain = {
        (row.work, tokens_of(row)): row.ratios[PLAIN]["seconds"]
        for row in rows
        if row.mechanism == "softmax" and "seconds" in row.ratios.get(PLAIN, {})
    }
    several = len({row.library for row in rows}) > 1
    curves: Curves = defaultdict(lambda: defaultdict(list))
    for row in sorted(rows, key=tokens_of):
        tokens = tokens_of(row)
        beside = plain.get((row.work, tokens))
        if not row.seconds:
            continue
        ratio = row.ratios.get(PLAIN, {}).get("median")
        if ratio is None and beside is not None:
            ratio = row.seconds["median"] / beside
        if ratio is not None:
            name = f"{row.mechanism} ({row.library})" if several else row.mechanism
            curves[row.work][name].append((tokens, ratio))
    return {work: dict(of) for work, of in curves.items()}


def tokens_of(row: Row) -> int:
    """The number of queries, or of keys where there are no queries."""
    return row.sizes.get("t") or row.sizes.get("s") or 0
