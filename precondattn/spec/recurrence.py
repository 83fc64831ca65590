"""The recurrence of linear attention and the delta rule, on a state S (d × e) for each head.

    S'_t = Γ_t ∘ S_{t−1},            Γ_t = e^{g_t}, g ≤ 0         decay,
    u_t  = v_t                       (additive)
    u_t  = β_t (v_t − S'_tᵀ a_t)     (delta rule)                 write,
    S_t  = S'_t + k_t u_tᵀ,
    o_t  = S_tᵀ q_t                                               read.

The delta rule erases what the state stores for the key a_t, which is k_t unless another one is
given, and writes with k_t. Where a_t is given as `undecayed`, it is read before the decay:
u_t = β_t (v_t − S_{t−1}ᵀ a_t). The decay g_t is one number, or one per row of the state (key
channel), or one per column (value channel). Sources: Katharopoulos et al. 2020 (linear attention),
Yang et al. 2024 (GLA, arXiv 2312.06635), Schlag et al. 2021 and Yang et al. 2024 (DeltaNet, arXiv
2406.06484), Yang et al. 2025 (gated DeltaNet, arXiv 2412.06464 Eq. 10), Kimi Team 2025 (a delta
rule with one decay per key channel, arXiv 2510.26692 Eq. 1), Hu et al. 2025 (another key, read
before the decay, arXiv 2506.02475). Two more forms, written independently of this one, are in
`parallel.py` and `chunkwise.py`.

Gradient, from the last token to the first, where Λ_t is the gradient of S_t:

    Λ_t = Γ_{t+1} ∘ dS'_{t+1} + q_t do_tᵀ,         plus, in Λ_N, the gradient of the final state,
    dq_t = S_t do_t,    du_t = Λ_tᵀ k_t,    dk_t = Λ_t u_t,
    additive:  dv_t = du_t,    dS'_t = Λ_t,
    delta:     dv_t = β_t du_t,    dβ_t = du_t·(v_t − S'_tᵀ a_t),    da_t = −S'_t dv_t,
               dS'_t = Λ_t − a_t dv_tᵀ,
    undecayed: da_t = −S_{t−1} dv_t,    dS'_t = Λ_t,    Λ_{t−1} += −a_t dv_tᵀ,
    dg_t = Σ dS'_t ∘ S'_t, over the entries that share the gate.

Γ_1 ∘ dS'_1 is the gradient of the initial state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from precondattn.arrays import TIME, Array, Step, Token, namespace, scan
from precondattn.spec.array_functions import after_zeros, row_sum, sum_to, transpose


class Stream(NamedTuple):
    """The inputs of the recurrence for the states of m heads."""

    q: Array
    """Queries (b, m, t, r, d), r per state. With t < s they belong to the last t tokens."""
    k: Array
    """(b, m, s, d)"""
    v: Array
    """(b, m, s, e)"""
    g: Array
    """Log-decay (b, m, s, 1 or d, 1 or e); −∞ resets the state."""
    beta: Array | None = None
    """Write strength of the delta rule (b, m, s); None for additive writes."""
    erase: Array | None = None
    """The key whose value the delta rule erases (b, m, s, d); None for k."""
    undecayed: Array | None = None
    """The erasing key in place of `erase`, if its value is read before the state decays."""


class StreamGradients(NamedTuple):
    """The gradients of a stream and of the initial state."""

    stream: Stream
    state: Array


def erased(x: Stream) -> Array:
    """The keys whose values the delta rule erases (b, m, s, d)."""
    if x.undecayed is not None:
        return x.undecayed
    return x.k if x.erase is None else x.erase


def recurrent(x: Stream, state: Array) -> tuple[Array, Array]:
    """The outputs (b, m, t, r, e), and the final state (b, m, d, e)."""
    step = _write_and_read if x.undecayed is None else _write_undecayed_and_read
    state, o = scan(step, state, (after_zeros(x.q, x.k.shape[TIME]), x.v, *_written(x)))
    return o[:, :, o.shape[TIME] - x.q.shape[TIME] :, ...], state


def recurrent_vjp(x: Stream, state: Array, d_o: Array, d_final: Array) -> StreamGradients:
    """The gradients, from those of the outputs and of the final state."""
    xp = namespace(x.k)
    t, s = x.q.shape[TIME], x.k.shape[TIME]
    q, d_o = after_zeros(x.q, s), after_zeros(d_o, s)

    step = _write if x.undecayed is None else _write_undecayed
    _, before = scan(step, state, (x.v, *_written(x)))
    decayed = xp.exp(x.g) * before
    erased_from = decayed if x.undecayed is None else before
    residual, u = x.v, x.v
    if x.beta is not None:
        residual = x.v - _read(erased_from, erased(x))
        u = x.beta[..., None] * residual
    d_q = d_o @ transpose(decayed + _outer(x.k, u))

    pull = _pull if x.undecayed is None else _pull_undecayed
    d_first, d_state = scan(pull, d_final, (q, d_o, *_written(x)), reverse=True)
    d_u = _read(d_state, x.k)
    d_k = (d_state @ u[..., None])[..., 0]
    d_v, d_decayed, d_beta = d_u, d_state, None
    d_erase, d_undecayed = None, None
    if x.beta is not None:
        d_beta = row_sum(d_u * residual)[..., 0]
        d_v = x.beta[..., None] * d_u
        d_erase = -(erased_from @ d_v[..., None])[..., 0]
        if x.undecayed is None:
            d_decayed = d_state - _outer(erased(x), d_v)
        else:
            d_erase, d_undecayed = None, d_erase
    if d_erase is not None and x.erase is None:
        d_k, d_erase = d_k + d_erase, None
    d_g = sum_to(d_decayed * decayed, x.g.shape)
    d_q = d_q[:, :, s - t :, ...]
    return StreamGradients(Stream(d_q, d_k, d_v, d_g, d_beta, d_erase, d_undecayed), d_first)


ByTokens = Callable[..., tuple[Array, ...]]
"""A function of arrays that computes each token from that token alone."""


class Form(Protocol):
    """An algorithm for the recurrence, which `recurrent` and `recurrent_vjp` define."""

    def forward(self, x: Stream, state: Array) -> tuple[Array, Array]:
        """The outputs (b, m, t, r, e), and the final state (b, m, d, e)."""

    def vjp(self, x: Stream, state: Array, d_o: Array, d_final: Array) -> StreamGradients:
        """The gradients, from those of the outputs and of the final state."""

    def by_tokens(self, function: ByTokens, *arrays: Array, axis: int = TIME) -> tuple[Array, ...]:
        """function(*arrays); `axis` is the time axis of every array."""

    def read(
        self, streams: Sequence[tuple[Stream, Array]], function: ByTokens, *arrays: Array
    ) -> tuple[tuple[Array, ...], list[Array]]:
        """function(*outputs, *arrays), with the outputs of the streams, and the final states."""


class AllTokens:
    """What forms share that have all tokens of a call at once."""

    @staticmethod
    def by_tokens(function: ByTokens, *arrays: Array, axis: int = TIME) -> tuple[Array, ...]:
        return function(*arrays)

    def read(
        self: Form, streams: Sequence[tuple[Stream, Array]], function: ByTokens, *arrays: Array
    ) -> tuple[tuple[Array, ...], list[Array]]:
        results = [self.forward(stream, state) for stream, state in streams]
        return function(*(o for o, _ in results), *arrays), [final for _, final in results]


class TokenByToken(AllTokens):
    """The definition of the recurrence, as a form."""

    forward = staticmethod(recurrent)
    vjp = staticmethod(recurrent_vjp)


RECURRENT: Form = TokenByToken()
"""The definition of the recurrence: one token after another."""


def _written(x: Stream) -> tuple[Array, ...]:
    """k and g, and for the delta rule β and the key that is erased."""
    return (x.k, x.g) if x.beta is None else (x.k, x.g, x.beta, erased(x))


def _outer(a: Array, b: Array) -> Array:
    return a[..., :, None] * b[..., None, :]


def _read(state: Array, q: Array) -> Array:
    """Sᵀ q."""
    return (q[..., None, :] @ state)[..., 0, :]


# The steps of the scans: (state, token) to (state, output).


def _writing(*, undecayed: bool) -> Step:
    """The step to the new state, which returns the old one."""

    def step(state: Array, token: Token) -> tuple[Array, Array]:
        v, k, g, *delta = token
        decayed = namespace(k).exp(g) * state
        if delta:
            beta, erase = delta
            v = beta[..., None] * (v - _read(state if undecayed else decayed, erase))
        return decayed + _outer(k, v), state

    return step


def _and_read(write: Step) -> Step:
    """The step that also reads the new state."""

    def step(state: Array, token: Token) -> tuple[Array, Array]:
        state, _ = write(state, token[1:])
        return state, token[0] @ state

    return step


def _pulling(*, undecayed: bool) -> Step:
    """The step to the contribution to the gradient of the previous state, which returns Λ."""

    def step(d_state: Array, token: Token) -> tuple[Array, Array]:
        q, d_o, k, g, *delta = token
        d_state = d_state + transpose(q) @ d_o
        decay = namespace(q).exp(g)
        if not delta:
            return decay * d_state, d_state
        beta, erase = delta
        d_erased = _outer(erase, beta[..., None] * _read(d_state, k))
        if undecayed:
            return decay * d_state - d_erased, d_state
        return decay * (d_state - d_erased), d_state

    return step


_write, _write_undecayed = _writing(undecayed=False), _writing(undecayed=True)
_write_and_read, _write_undecayed_and_read = _and_read(_write), _and_read(_write_undecayed)
_pull, _pull_undecayed = _pulling(undecayed=False), _pulling(undecayed=True)
