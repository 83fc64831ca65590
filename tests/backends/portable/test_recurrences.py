"""Recurrences in chunks, of few tokens and of one token, against the definition token by token.

Every kind of decay, with open, closed and intermediate gates; keys that coincide or are 0; any
number of tokens and of queries; with an initial state and a gradient of the last one. An equality
holds to 1e-10 of the largest number in float64, and to 2e-5 in float32.
"""

from dataclasses import dataclass

import numpy as np
import pytest

import precondattn as pa
from precondattn.cache import Cache
from precondattn.spec.l2_norm import l2_norm
from precondattn.spec.recurrence import Stream, recurrent, recurrent_vjp
from precondattn_conformance.inputs import CallLayout, make_inputs, slice_tokens
from precondattn_portable import chunkwise_delta
from precondattn_portable.arithmetic import IN_PLACE, STANDARD, InPlace
from precondattn_portable.chunkwise import Chunkwise
from precondattn_portable.few_tokens import FewTokens
from precondattn_portable.sizes import ON_ACCELERATOR, ON_CPU
from precondattn_portable.stateful import OneToken
from precondattn_portable.triangular_inverse import unit_lower_inverse

array_api_strict = pytest.importorskip("array_api_strict")
torch = pytest.importorskip("torch")

from precondattn_torch.arithmetic import TORCH, TorchArithmetic  # noqa: E402

CHUNK = 8
FIELDS = ("erase", "undecayed")
KINDS = ("none", "head", "key", "value", "delta", "gated delta", "key delta")
ERASING = tuple(f"{gate}delta, {name}" for gate in ("", "gated ", "key ") for name in FIELDS)
"""Delta rules that erase with another key, read in the decayed state or before the decay."""
ARITHMETIC = {"numpy": IN_PLACE, "array_api_strict": STANDARD, "torch": TORCH}
LIBRARIES = {
    "numpy": np.asarray,
    "array_api_strict": array_api_strict.asarray,
    "torch": torch.as_tensor,
}
GATES = {
    "open": lambda rng, shape: np.zeros(shape),
    "weak": lambda rng, shape: np.full(shape, -1e-3),
    "strong": lambda rng, shape: np.full(shape, -30.0),
    "closed": lambda rng, shape: np.full(shape, -np.inf),
    "either": lambda rng, shape: rng.choice([0.0, -1e4], size=shape),
    "one closed": lambda rng, shape: (
        np.where(np.arange(shape[2]) % 11 == 5, -np.inf, -0.1)[:, None, None] + np.zeros(shape)
    ),
    "any": lambda rng, shape: np.where(
        rng.random(size=shape) < 0.4,
        rng.choice([0.0, -1e-3, -30.0, -1e4, -np.inf, -1.0], size=shape),
        -np.exp(0.7 * rng.normal(size=shape)),
    ),
}


def unit(rng, *shape):
    rows = rng.normal(size=shape)
    return rows / np.linalg.vector_norm(rows, axis=-1, keepdims=True)


def problem(kind, s, t=None, r=1, gates="any"):
    """A stream, its initial state, and cotangents of the outputs and the last state."""
    rng = np.random.default_rng([(*KINDS, *ERASING).index(kind), s, r])
    kind, _, field = kind.partition(", ")
    b, m, d, e = 2, 2, 4, 3
    few, equal = unit(rng, 4, d), rng.integers(4, size=(b, m, s))
    few[0] = 0
    k = np.where(rng.random(size=(b, m, s, 1)) < 0.5, few[equal], unit(rng, b, m, s, d))
    shape = (b, m, s, d if "key" in kind else 1, e if kind == "value" else 1)
    g = np.zeros(shape) if kind in ("none", "delta") else GATES[gates](rng, shape)
    beta = rng.choice([0.0, 1.0, 2.0, 0.3], size=(b, m, s)) if "delta" in kind else None
    q, v = rng.normal(size=(b, m, t or s, r, d)), rng.normal(size=(b, m, s, e))
    state = rng.normal(size=(b, m, d, e))
    erase = {field: k + 0.3 * rng.normal(size=k.shape)} if field else {}
    return (
        Stream(q, k, v, g, beta, **erase),
        state,
        rng.normal(size=(*q.shape[:4], e)),
        0.5 * state[::-1],
    )


def moved(x, to):
    return Stream(*(None if a is None else to(a.copy()) for a in x))


def all_equal(result, expected, bound=1e-10):
    for one, other in zip(result, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            one = np.asarray(one)
            assert one.shape == other.shape
            assert np.abs(one - other).max() <= bound * max(np.abs(other).max(), 1e-6)


def check(given, form, to=np.asarray, bound=1e-10):
    x, state, d_o, d_last = given
    here, first = moved(x, to), to(state.copy())
    all_equal(form.forward(here, first), recurrent(x, state), bound)
    result, expected = (
        form.vjp(here, first, to(d_o), to(d_last)),
        recurrent_vjp(x, state, d_o, d_last),
    )
    all_equal([*result.stream, result.state], [*expected.stream, expected.state], bound)
    for one, other in zip([*here, first], [*moved(x, to), to(state)], strict=True):
        np.testing.assert_array_equal(one, other)  # Nothing is written to.


@pytest.fixture
def several_groups(monkeypatch):
    """Two chunks per group, so that three chunks have two groups. On an accelerator they are one
    group, whose states are computed in joined steps."""
    monkeypatch.setattr(ON_CPU, "chunk_entries", 2 * 4 * CHUNK * CHUNK)
    monkeypatch.setattr(chunkwise_delta, "MOST_STEPS", 1)


@pytest.mark.usefixtures("several_groups")
@pytest.mark.parametrize(("s", "r"), [(1, 3), (7, 1), (8, 3), (9, 1), (21, 1), (21, 3)])
@pytest.mark.parametrize("kind", [*KINDS, *ERASING])
def test_chunks_are_the_definition(kind, s, r):
    for t in sorted({s, max(s - 2, 1), 1}):
        for ops in (IN_PLACE, InPlace(ON_ACCELERATOR)):
            check(problem(kind, s, t, r), Chunkwise(ops, CHUNK))
    if (s, r) == (21, 3):
        few = TorchArithmetic(ON_ACCELERATOR)
        check(problem(kind, 43, 14, 2), Chunkwise(few, CHUNK), LIBRARIES["torch"])
        for library in ("torch", "array_api_strict"):
            check(problem(kind, s, 14, 2), Chunkwise(STANDARD, CHUNK), LIBRARIES[library])


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("kind", ["head", "key", "value", "gated delta"])
def test_no_gate_costs_accuracy(kind, gates):
    """Strong gates in chunks of 64 cost no digits, in float64 and in float32."""
    given = problem(kind, 70, gates=gates)
    check(given, Chunkwise(IN_PLACE))
    check(given, Chunkwise(InPlace(ON_ACCELERATOR)))
    check(given, Chunkwise(IN_PLACE), lambda a: a.astype(np.float32), 2e-5)


@pytest.mark.thorough(but=("gated delta, undecayed",))
@pytest.mark.parametrize("kind", [*KINDS[3:], *ERASING])
def test_chunks_of_jax_are_the_definition(kind):
    jax = pytest.importorskip("jax")
    from precondattn_jax.chunkwise import Chunkwise as JaxChunkwise

    check(problem(kind, 150), JaxChunkwise(), jax.numpy.asarray, 1e-5)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("kind", [*KINDS, *(kind for kind in ERASING if kind[:5] != "delta")])
def test_few_tokens_and_one_token_are_the_definition(kind, library):
    ops, to = ARITHMETIC[library], LIBRARIES[library]
    decays = kind not in ("none", "delta")
    for t, r in ((7, 1), (4, 3)) if kind != "key delta" else ():
        x, state, *_ = problem(kind, 7, t, r)
        out, _ = FewTokens(ops, decays=decays).forward(moved(x, to), to(0 * state))
        all_equal([out], recurrent(x, 0 * state)[:1])
    x, state, *_ = problem(kind, 1, r=2)
    for in_place in (False, True) if library != "array_api_strict" else (False,):
        given = to(state.copy())
        form = OneToken(ops, decays=decays, **({"in_place": True} if in_place else {}))
        found = form.forward(moved(x, to), given)
        all_equal(found, recurrent(x, state), 1e-12)
        assert (found[1] is given) == in_place
        assert in_place or np.array_equal(np.asarray(given), state)


@pytest.mark.parametrize("size", [1, 2, 7, 9, 24, 33, 64, 128])
def test_the_inverse_of_triangular_matrices(size):
    k = unit(np.random.default_rng(size), 3, size, 8)
    near, ones = k[:, :1] + 1e-3 * k, np.ones((3, size, size))
    made = [*(a @ np.swapaxes(a, -1, -2) for a in (k, near)), ones, -ones / 3, 2 * ones]
    strict = np.tril(np.stack(made[: 5 if size <= 64 else 3]), -1)
    before, expected = strict.copy(), np.linalg.inv(np.eye(size) + strict)
    bound = 1e-11 * np.abs(expected).max(axis=(-2, -1), keepdims=True)
    for ops, library in ((IN_PLACE, "numpy"), (STANDARD, "torch"), (STANDARD, "array_api_strict")):
        result = np.asarray(unit_lower_inverse(ops, LIBRARIES[library](strict)))
        assert np.all(np.abs(result - expected) <= bound)
    assert np.array_equal(strict, before)
    narrow = unit_lower_inverse(IN_PLACE, strict.astype(np.float32))
    assert narrow.dtype == np.float32
    assert np.all(np.abs(narrow - expected) <= 1e6 * bound)


# ---- Calls ---------------------------------------------------------------------------------------

MECHANISMS = ("linear", "linear[normalize=true]", "retention", "ssd", "gla", "delta", "gated_delta")
MECHANISMS += ("kda", "rwkv6", "gsa")


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize(
    "expression",
    [
        *(*MECHANISMS, "differential", "differential(gsa)", "softmax[window=3]"),
        *("lucid[beta=true]", "lucid(softmax[window=3])", "lucid[normalize=queries_and_keys]"),
    ],
)
def test_a_donated_cache_and_one_that_is_kept_give_the_steps_of_the_reference(expression, library):
    """`differential` reads one buffer in two calls, and the first must not overwrite it."""
    m = pa.parse(expression)
    x = make_inputs(m, CallLayout("test", b=2, t=6, s=6), "random")
    parts = [slice_tokens(m, x, *edges) for edges in ((0, 3), (3, 4), (4, 5), (5, 6))]
    results = {}
    for way in ("kept", "donated", "reference"):
        to = np.asarray if way == "reference" else LIBRARIES[library]
        how = {"backend": "reference"} if way == "reference" else {"donate": way == "donated"}
        cache = m.init_cache(**{n: to(a) for n, a in parts[0].items()}, capacity=7)
        results[way] = outs = []
        for part in parts:
            out, cache = m.extend(cache, **{n: to(a.copy()) for n, a in part.items()}, **how)
            outs += [out, *(cache.store[name] for name in sorted(cache.store))]
    for way in ("kept", "donated"):
        last = results[way][-1 - len(cache.store) :]
        expected = results["reference"][-1 - len(cache.store) :]
        for one, other in zip(last, expected, strict=True):
            np.testing.assert_allclose(np.asarray(one), other, rtol=1e-10, atol=1e-12)
        each = 1 + len(cache.store)
        for one, other in zip(results[way][::each], results["reference"][::each], strict=True):
            np.testing.assert_allclose(np.asarray(one), other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("h", "n"), [(4, 2), (2, 2)])
@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("text", ["ssd", "gla", "gated_delta", "kda[scale=0.3]"])
def test_pytorch_writes_a_token_to_states_of_any_grouping_of_heads(text, is_turned, h, n):
    m = pa.parse(text)
    layout = CallLayout("x", b=2, t=1, s=1, h=h, n=n, d=4, e=3, values_per_head=2 + (h == 2))
    x = {name: torch.tensor(a) for name, a in make_inputs(m, layout, "random").items()}
    empty = m.init_cache(**x)
    (name,) = empty.store
    state = torch.randn(empty.store[name].shape, dtype=torch.float64)
    if is_turned:  # Mamba-2 in Transformers has this layout.
        state = state.mT.contiguous().mT
    given = Cache(empty.length, {name: state}, empty.kinds)
    expected, after = m.extend(given, **x, backend="reference")
    out, written = m.extend(given, **x, donate=True)
    assert written.store[name].data_ptr() == state.data_ptr()
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(written.store[name], after.store[name], rtol=1e-12, atol=1e-12)


@dataclass(frozen=True)
class LucidWithWindows(pa.Preconditioner):
    """LUCID whose system has another window than its softmax."""

    base: pa.Mechanism = pa.Softmax()
    window: int | None = None

    def steps(self):
        return pa.step("y", pa.LucidSolve(window=self.window)), pa.step("out", self.base, v="y")


LucidWithWindows.name = "lucid_with_windows"  # A class with a name would be registered.


@pytest.mark.parametrize(("of_system", "of_softmax"), [(3, None), (None, 3), (None, None), (3, 3)])
def test_a_token_of_lucid_sees_what_is_in_both_windows(of_system, of_softmax):
    m = LucidWithWindows(pa.Softmax(window=of_softmax), window=of_system)
    x = make_inputs(m, CallLayout("test", t=6, s=6), "random")
    cache, outs = m.init_cache(**x, capacity=6), []
    for i in range(6):
        out, cache = m.extend(cache, **slice_tokens(m, x, i, i + 1))
        outs.append(out)
    expected = m(**x, backend="reference")
    np.testing.assert_allclose(np.concat(outs, axis=1), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-6])
def test_rows_of_any_size_are_normalized_in_torch_as_defined(dtype, eps):
    sizes = np.asarray([1e-30, 1e-6, 1.0, 1e30])[:, None]
    rows = sizes * np.random.default_rng(0).normal(size=(4, 8))
    x = np.concatenate([rows, np.zeros((1, 8))]).astype(dtype)
    found = TORCH.unit_rows(torch.as_tensor(x), eps)
    assert found.dtype == getattr(torch, dtype)
    np.testing.assert_allclose(found, l2_norm(x, eps), rtol=4 * np.finfo(dtype).eps, atol=0)
