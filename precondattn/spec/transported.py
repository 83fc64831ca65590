"""PaTH's metric: the key is transported to the query by one reflection per token.

    ⟨q_i, k_j⟩ = q_iᵀ H_i H_{i−1} … H_{j+1} k_j,    H_t = I − β_t w_t w_tᵀ

with the empty product at i = j. Source: PaTH (arXiv 2505.16381); LUCID Table 1. In closed form

    A = q kᵀ − B Z R,    B = tril(q wᵀ),    R = stril(w kᵀ),    G = stril(w wᵀ),
    Z = (I + diag(β) G)⁻¹ diag(β),

which exists at β = 0, where the T = diag(β)⁻¹ + G of LUCID's table does not. The triangular masks
are computed from positions and segments, so that there may be fewer queries than keys, and packed
sequences do not interact.

Gradient, with M = (I + diag(β) G)⁻¹ and dA = 0 above the diagonal:

    dB = −tril(dA (ZR)ᵀ),    dR = −stril((BZ)ᵀ dA),    dZ = −Bᵀ dA Rᵀ,    dG = −stril(Zᵀ dZ Zᵀ),
    dq = dA k + dB w,    dk = dAᵀ q + dRᵀ w,    dw = dBᵀ q + dR k + (dG + dGᵀ) w,
    dβ = diag(Mᵀ dZ (I + G diag(β))⁻ᵀ).

Cache: the transported keys. A new token rewrites every cached key, k̃ ← H k̃. With `flush` C > 1
that happens once every C tokens; in between, the reflections since the last flush are cached
separately and applied to the query. The closed form is the same, with the pending reflections among
its w.

For unit w and β in [0, 2] every H is a contraction, so that |⟨q, k⟩| ≤ ‖q‖ ‖k‖. Otherwise products
of reflections may grow exponentially.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from precondattn.algebra import Flops, Inputs, options
from precondattn.algebra.flops import CHUNK
from precondattn.arrays import arange_like, as_index, cast, namespace, take_tokens, zero_where_not
from precondattn.cache import Replace, Rewrite, Slot, Updates
from precondattn.frame import Frame
from precondattn.frameworks.types import Array, ByName
from precondattn.given import at_least
from precondattn.spec.array_functions import (
    identity_like,
    row_sum,
    solve_lower,
    solve_upper,
    swap_time_and_heads,
    transpose,
)
from precondattn.spec.metric import DOT, Dot, Extra, Metric


class TokenPositions(NamedTuple):
    """Positions (b or 1, s) and, in packed sequences, segments (b, s) of tokens."""

    position: Array
    segment: Array | None

    def follow(self, other: TokenPositions, *, strict: bool) -> Array:
        """The mask (b or 1, 1, t, s): is token i at or after token j of `other`?"""
        i, j = self.position[:, :, None], other.position[:, None, :]
        mask = j < i if strict else j <= i
        if self.segment is not None and other.segment is not None:
            mask = mask & (self.segment[:, :, None] == other.segment[:, None, :])
        return mask[:, None, :, :]


class Reflections(NamedTuple):
    """I − β w wᵀ for each token: w (b, h, s, d), β (b, h, s, 1)."""

    w: Array
    beta: Array
    tokens: TokenPositions

    def overlap(self) -> Array:
        """G = stril(w wᵀ)."""
        return _product(self.w, self.w, self.tokens.follow(self.tokens, strict=True))

    def gathered(self, right: Array) -> Array:
        """Z right = (I + diag(β) G)⁻¹ diag(β) right."""
        matrix = self.beta * self.overlap()
        return solve_lower(identity_like(matrix) + matrix, self.beta * right)


def _product(left: Array, right: Array, mask: Array) -> Array:
    return zero_where_not(mask, left @ transpose(right))


def _scores(
    q: Array, q_tokens: TokenPositions, k: Array, k_tokens: TokenPositions, reflections: Reflections
) -> Array:
    """A = q kᵀ − B Z R."""
    w, w_tokens = reflections.w, reflections.tokens
    b = _product(q, w, q_tokens.follow(w_tokens, strict=False))
    r = _product(w, k, w_tokens.follow(k_tokens, strict=True))
    return q @ transpose(k) - b @ reflections.gathered(r)


@dataclass(frozen=True)
class Transported:
    """q_iᵀ H_i … H_{j+1} k_j, with H_t = I − β_t w_t w_tᵀ."""

    flush: int = 1
    """The cached keys are transported whenever the sequence's length is a multiple of `flush`."""

    inputs: ClassVar[Inputs] = Inputs(w="b s n d unit", beta="b s n in [0, 2]")

    @property
    def name(self) -> str:
        return "transported" if self.flush == 1 else f"transported/{self.flush}"

    def __str__(self) -> str:
        return self.name

    def slots(self) -> tuple[Slot, ...]:
        # Repeatedly rewritten keys in half precision would accumulate rounding errors.
        key = Slot("key", "path({k},{w},{beta})", "b c n d", wide=True, is_rewritten=True)
        if self.flush == 1:
            return (key,)
        return (
            key,
            Slot("pending_w", "pending({w})", f"b {self.flush} n d", wide=True),
            Slot("pending_beta", "pending({beta})", f"b {self.flush} n", wide=True),
        )

    def scores(
        self, q: Array, k: Array, extra: Extra, frame: Frame, past: ByName | None = None
    ) -> Array:
        q_tokens, k_tokens = _tokens(frame)
        reflections = Reflections(extra["w"], extra["beta"][..., None], k_tokens)
        if past is not None:
            k = namespace(k).concat([past["key"], k], axis=2)
            reflections = self._since_flush(past, extra, frame)
        return _scores(q, q_tokens, k, k_tokens, reflections)

    def vjp(
        self, q: Array, k: Array, extra: Extra, frame: Frame, d_scores: Array
    ) -> tuple[Array, Array, dict[str, Array]]:
        q_tokens, k_tokens = _tokens(frame)
        reflections = Reflections(extra["w"], extra["beta"][..., None], k_tokens)
        w, beta = reflections.w, reflections.beta
        tril_mask = q_tokens.follow(k_tokens, strict=False)
        stril_mask = k_tokens.follow(k_tokens, strict=True)
        b, r, g = _product(q, w, tril_mask), _product(w, k, stril_mask), reflections.overlap()
        identity = identity_like(g) + 0 * g  # Broadcast to one matrix per head.
        zr, z = reflections.gathered(r), reflections.gathered(identity)

        d_b = -zero_where_not(tril_mask, d_scores @ transpose(zr))
        d_r = -zero_where_not(stril_mask, transpose(b @ z) @ d_scores)
        d_z = -transpose(b) @ d_scores @ transpose(r)
        d_g = -zero_where_not(stril_mask, transpose(z) @ d_z @ transpose(z))
        left = solve_upper(transpose(identity + beta * g), d_z)
        right = solve_lower(identity + g * transpose(beta), identity)
        d_q = d_scores @ k + d_b @ w
        d_k = transpose(d_scores) @ q + transpose(d_r) @ w
        d_w = transpose(d_b) @ q + d_r @ k + (d_g + transpose(d_g)) @ w
        return d_q, d_k, {"w": d_w, "beta": row_sum(left * right)[..., 0]}

    def advance(self, past: ByName, k: Array, extra: Extra, frame: Frame) -> Updates:
        xp = namespace(k)
        since_flush = self._since_flush(past, extra, frame)
        count = frame.q_position.shape[1]
        if frame.q_valid is not None:
            dtype = frame.q_position.dtype
            count = xp.sum(cast(frame.q_valid, dtype), axis=1, keepdims=True, dtype=dtype)
        length = frame.q_position[:, :1] + count
        flushed = length - length % self.flush
        is_applied = (since_flush.tokens.position < flushed)[:, None, :, None]
        applied = since_flush._replace(
            w=zero_where_not(is_applied, since_flush.w),
            beta=zero_where_not(is_applied, since_flush.beta),
        )
        keys = xp.concat([past["key"], k], axis=2)
        r = _product(applied.w, keys, since_flush.tokens.follow(_tokens(frame)[1], strict=True))
        keys = swap_time_and_heads(keys - transpose(applied.gathered(r)) @ applied.w)
        capacity = past["key"].shape[2]
        updates: Updates = {"key": Rewrite(keys[:, :capacity, ...], keys[:, capacity:, ...])}
        if self.flush > 1:
            w, beta = self._pending(since_flush, frame, length, flushed)
            updates["pending_w"] = Replace(w)
            updates["pending_beta"] = Replace(beta[..., 0])
        return updates

    def flops(self, pairs: float, keys: int, d: int, e: int) -> Flops:
        """The FLOPs of dot products, and a key's product with the reflections of a chunk."""
        forward = pairs * (d + e + min(2 * d, d * d / CHUNK))
        decode = 2.0 * keys * (d + e) + min(4.0 * keys * d, 2.0 * keys * d * d / CHUNK)
        return Flops(forward, 2.75 * forward, decode)

    def _since_flush(self, past: ByName, extra: Extra, frame: Frame) -> Reflections:
        """The reflections not yet applied to the cached keys: pending ones, then the new ones."""
        xp = namespace(extra["w"])
        w, beta, position = extra["w"], extra["beta"][..., None], frame.q_position
        if self.flush > 1:
            start = position[:, :1]
            slot = arange_like(self.flush, position)[None, :] + (start - start % self.flush)
            w = xp.concat([past["pending_w"], w], axis=2)
            beta = xp.concat([past["pending_beta"][..., None], beta], axis=2)
            position = xp.concat([slot, position], axis=1)
        return Reflections(w, beta, TokenPositions(position, None))

    def _pending(
        self, since_flush: Reflections, frame: Frame, length: Array, flushed: Array
    ) -> tuple[Array, Array]:
        """w and β (b, flush, n, …) of the tokens after the new last flush, 0 in unused slots."""
        xp = namespace(since_flush.w)
        start = frame.q_position[:, :1]
        position = flushed + arange_like(self.flush, flushed)[None, :]
        index = xp.where(
            position < start, position - (start - start % self.flush), self.flush + position - start
        )
        index = as_index(xp.clip(index, min=0, max=since_flush.w.shape[2] - 1))
        is_present = (position < length)[:, :, None, None]
        w = take_tokens(swap_time_and_heads(since_flush.w), index)
        beta = take_tokens(swap_time_and_heads(since_flush.beta), index)
        return zero_where_not(is_present, w), zero_where_not(is_present, beta)


def _tokens(frame: Frame) -> tuple[TokenPositions, TokenPositions]:
    """The tokens of the queries and those of the keys."""
    return (
        TokenPositions(frame.q_position, frame.q_segment),
        TokenPositions(frame.k_position, frame.k_segment),
    )


def metric_option(default: Metric) -> options.OptionValue:
    """The option of a leaf that uses its base's metric: `dot`, `transported/64`."""

    def read(text: str) -> options.OptionValue:
        name, _, flush = text.partition("/")
        if text == DOT.name:
            return DOT
        if name == "transported" and (not flush or (flush.isdecimal() and int(flush) > 0)):
            return Transported(int(flush or 1))
        return text

    def accept(value: options.OptionValue) -> options.OptionValue:
        value = read(value) if isinstance(value, str) else value
        if isinstance(value, Transported):
            return Transported(at_least(1, "flush", value.flush))
        if not isinstance(value, Dot):
            raise ValueError
        return value

    expected = "one of dot, transported, transported/2, transported/3 ..."
    return options.option(default, options.OptionKind(expected, accept, read))
