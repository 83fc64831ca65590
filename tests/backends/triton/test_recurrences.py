"""The gated delta rule and its variants by Triton kernels against the definition, interpreted."""

from itertools import pairwise

import pytest

pytest.importorskip("triton")

import torch

import precondattn as pa
from precondattn.backend import Request
from precondattn.kernel_backend.precise import VARIABLE
from precondattn_triton import Triton
from precondattn_triton.configurations import Configuration
from tests.backends.triton import pieces
from tests.backends.triton.tiles import RECURRENT, error, small_tiles

CHUNKS_OF_32 = dict.fromkeys(RECURRENT, Configuration(32, 16))
CHUNKS_OF_64 = dict.fromkeys(RECURRENT, Configuration(64, 16))

BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
BACKENDS = ("triton", "torch")


def problem(layer, t, d=12, e=8, b=1, heads=(1, 2), slots=5, keys="random", gates="random"):
    """Inputs; `heads` are those of keys, and those of states or queries."""
    torch.manual_seed(t)
    n, m = heads
    sizes = {"b": b, "t": t, "s": t, "d": d, "e": e, "h": m, "u": m, "n": n, "m": slots}
    if getattr(getattr(layer, "declares", None), "heads", "n") == "u":
        sizes["h"] = n
    x = {name: torch.randn(pattern.shape(sizes)) for name, pattern in layer.inputs.items()}
    if keys == "clustered":
        x["k"] = 0.1 * x["k"] + torch.randn(1, 1, 1, d)
    if keys == "equal":
        x["k"] = x["k"][:, :1].expand_as(x["k"]).clone()
    x["k"] /= x["k"].norm(dim=-1, keepdim=True)
    if keys == "zero":
        x["k"][:, ::3] = 0
    if "p" in x:
        x["p"] = (x["k"] + 0.3 * x["p"]) / 2
    for name in ("g", "g_atk"):
        if name in x:
            x[name] = -0.3 * x[name].abs()
            if gates == "extreme":
                drawn = torch.randint(0, 4, x[name].shape)
                x[name] = torch.tensor([0.0, -1e-6, -20.0, -1e4])[drawn]
    if "beta" in x:
        x["beta"] = 2 * torch.rand_like(x["beta"])
        x["beta"][:, ::4] = 0
        x["beta"][:, 1::4] = 1
    for name in ("s", "contraction", "b", "w", "beta_atk"):
        if name in x:
            x[name] = torch.rand_like(x[name])
    return x


def doubled(arrays):
    return {name: array.double() for name, array in arrays.items()}


def check(layer, x, dtype=torch.float32, bound=None, tiles=None, **masks):
    """Output and gradients, against the definition in double precision."""
    x = {name: array.to(dtype) for name, array in x.items()}
    expected, pullback = layer.vjp(**doubled(x), **masks, backend="reference")
    d_out = torch.randn(expected.shape).to(dtype)
    gradients = pullback(d_out.double())
    with small_tiles(**(tiles or {})):
        out, pullback = layer.vjp(**x, **masks, backend=BACKENDS)
        result = pullback(d_out)
    bound = bound or BOUNDS[dtype]
    assert error(out, expected) < bound
    for name, gradient in gradients.items():
        assert error(result[name], gradient) < 2 * bound, name
        assert result[name].dtype == dtype


@pytest.mark.parametrize(
    ("t", "dtype", "d", "e"),
    [(33, torch.float32, 20, 40), (31, torch.bfloat16, 12, 20), (1, torch.float16, 8, 8)],
)
def test_lengths_around_a_chunk_blocks_of_channels_and_every_dtype(t, dtype, d, e):
    check(pa.GatedDelta(), problem(pa.GatedDelta(), t, d=d, e=e, heads=(1, 1)), dtype)


@pytest.mark.parametrize("keys", ["clustered", "equal"])
def test_keys_that_coincide_or_nearly_do(keys):
    check(pa.GatedDelta(), problem(pa.GatedDelta(), 32, keys=keys, heads=(1, 1)), bound=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("keys", ["clustered", "equal", "zero"])
def test_keys_that_coincide_with_a_gate_for_each_channel(keys):
    x = problem(pa.KDA(), 33, keys=keys, heads=(1, 1), gates="extreme")
    check(pa.KDA(), x, bound=1e-5, tiles=CHUNKS_OF_32)


@pytest.mark.parametrize("keys", ["clustered", "equal"])
def test_coinciding_keys_cost_a_precise_kernel_no_accuracy_in_float16(monkeypatch, keys):
    monkeypatch.setenv(VARIABLE, "1")
    x = problem(pa.Delta(), 40, keys=keys, heads=(1, 1))
    x["beta"] = torch.full_like(x["beta"], 1.95)
    check(pa.Delta(), x, torch.float16, bound=8e-4)


def test_factors_in_bfloat16_are_rounded_unless_kernels_are_precise(monkeypatch):
    inputs = problem(pa.GatedDelta(), 40, heads=(1, 1))
    x = {name: array.bfloat16() for name, array in inputs.items()}
    expected, pullback = pa.GatedDelta().vjp(**doubled(x), backend="reference")
    d_out = torch.randn(expected.shape).bfloat16()
    d_g = pullback(d_out.double())["g"]
    errors = []
    for value in ("1", "0"):
        monkeypatch.setenv(VARIABLE, value)
        with small_tiles():
            pullback = pa.GatedDelta().vjp(**x, backend=BACKENDS)[1]
            errors.append(error(pullback(d_out)["g"], d_g))
    assert errors[0] < 3e-3 < errors[1] < 2e-2


def test_zero_keys_and_open_gates_next_to_closed_ones():
    check(pa.GatedDelta(), problem(pa.GatedDelta(), 32, keys="zero", gates="extreme"))


@pytest.mark.parametrize(
    "layer", ["delta[scale=0.3]", "ssd", "retention", "linear", "linear[normalize=true]"]
)
def test_special_cases_run_by_the_same_kernels(layer):
    layer = pa.parse(layer)
    x = problem(layer, 17)
    if layer == pa.Linear(normalize=True):
        x |= {"q": x["q"].abs(), "k": x["k"].abs()}
    check(layer, x)


@pytest.mark.thorough(
    but=("delta_product[steps=3,scale=0.3]-9-dtype7", "atk[learned=true]-9-dtype11")
)
@pytest.mark.parametrize(
    ("layer", "t", "dtype"),
    [
        ("gdn2", 33, torch.float32),
        ("gdn2[scale=0.3]", 16, torch.bfloat16),
        ("comba", 33, torch.float32),
        ("comba[scale=0.3]", 17, torch.bfloat16),
        ("comba[erases=decayed]", 17, torch.float16),
        ("comba", 1, torch.float32),
        ("delta_product", 17, torch.float32),
        ("delta_product[steps=3,scale=0.3]", 9, torch.bfloat16),
        ("delta_product", 1, torch.float16),
        ("atk(delta)", 17, torch.float32),
        ("atk", 33, torch.float32),
        ("atk[learned=true]", 9, torch.bfloat16),
        ("atk(kda)", 17, torch.float16),
        ("atk(gdn2)", 17, torch.float32),
        ("atk(comba)", 17, torch.float32),
    ],
)
def test_rules_that_erase_or_write_otherwise_run_by_the_same_kernels(layer, t, dtype):
    layer = pa.parse(layer)
    check(layer, problem(layer, t, gates="extreme" if t > 30 else "random"), dtype)


@pytest.mark.thorough
def test_contracted_queries_run_by_the_same_kernels():
    check(
        pa.parse("ccq(gated_delta)"),
        problem(pa.GatedDelta(), 17) | {"contraction": torch.rand(1, 17, 1)},
    )
    layer = pa.ConditionedQuery(decay="head")
    check(layer, problem(layer, 17), torch.bfloat16)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layer", "t", "dtype"),
    [
        ("gla", 33, torch.float32),
        ("gla", 16, torch.bfloat16),
        ("rwkv6", 16, torch.bfloat16),
        ("gsa", 33, torch.float16),
        ("kda", 33, torch.float32),
        ("kda[scale=0.3]", 16, torch.bfloat16),
        ("kda", 31, torch.float16),
    ],
)
def test_a_gate_for_each_channel_gives_the_definition(layer, t, dtype):
    """Chunks with five halvings; channels in two blocks."""
    layer = pa.parse(layer)
    heads = (1, 2) if t == 16 else (1, 1)
    check(layer, problem(layer, t, d=20, heads=heads), dtype, tiles=CHUNKS_OF_32)


@pytest.mark.thorough(but=("gla-extreme", "gla-random"))
@pytest.mark.parametrize(
    ("layer", "gates"),
    [
        ("gla", "random"),
        ("gla", "extreme"),
        ("rwkv6", "extreme"),
        ("gsa", "extreme"),
        ("kda", "extreme"),
    ],
)
def test_all_halvings_of_a_chunk_as_it_is_shipped(layer, gates):
    """Open gates of channels next to closed ones, or all gates between."""
    layer = pa.parse(layer)
    x = problem(layer, 64, d=8, heads=(1, 1), gates=gates)
    segments = torch.tensor([[0] * 37 + [1] * 27])
    check(layer, x, tiles=CHUNKS_OF_64, segment_ids=segments)


@pytest.mark.thorough
def test_keys_of_more_than_256_channels_have_a_gate_each():
    check(pa.GLA(), problem(pa.GLA(), 17, d=264, heads=(1, 1)), torch.bfloat16)


@pytest.mark.thorough
def test_two_queries_per_state_with_two_blocks_of_gates():
    """Gates of the first state's columns and of the second state's rows; keys in two blocks too.

    In three chunks: only the second one has both an initial state and a gradient of its last state.
    """
    layer = pa.GSA()
    check(layer, problem(layer, 33, d=20, slots=20))


@pytest.mark.parametrize("layer", ["retention", "gla", "rwkv6", "gsa", "kda"])
def test_fewer_queries_than_keys_are_those_of_the_last_tokens(layer):
    layer = pa.parse(layer)
    x = problem(layer, 18, heads=(1, 1))
    check(layer, x | {"q": x["q"][:, 7:]})


def test_inputs_with_arbitrary_strides():
    x = problem(pa.GatedDelta(), 19)
    for name, array in x.items():
        axes = [*reversed(range(array.ndim))]
        x[name] = array.permute(axes).contiguous().permute(axes)
    check(pa.GatedDelta(), x)


@pytest.mark.thorough
def test_padding_and_other_segments_have_no_effect():
    x = problem(pa.GatedDelta(), 20, b=2, heads=(1, 1))
    segments = torch.tensor([[0] * 3 + [2] * 12 + [5] * 5, [1] * 20])
    check(pa.GatedDelta(), x, segment_ids=segments)
    x = {name: array.clone() for name, array in x.items()}
    lengths = torch.tensor([20, 3])
    for array in x.values():
        array[1, 3:] = torch.nan
    check(pa.GatedDelta(), x, lengths=lengths)
    is_visible = torch.arange(20)[None] % 3 != 1
    check(pa.GatedDelta(), problem(pa.GatedDelta(), 20, heads=(1, 1)), key_mask=is_visible)


def states_of(layer, x, dtype):
    """A cache with random states."""
    cache = layer.init_cache(**x)
    store = {name: torch.rand(a.shape).to(dtype) for name, a in cache.store.items()}
    return cache._replace(store=store)


@pytest.mark.thorough(but=("gla-cuts3",))
@pytest.mark.parametrize(
    ("layer", "cuts"),
    [
        ("gated_delta", (0, 1, 18, 19)),
        ("ssd", (0, 16, 17)),
        ("ccq(gated_delta)", (0, 5, 6)),
        ("gla", (0, 1, 17)),
        ("gsa", (0, 16, 17)),
        ("kda", (0, 1, 17)),
    ],
)
def test_any_split_continues_the_state_and_its_gradient(layer, cuts):
    layer = pa.parse(layer)
    x = problem(layer, cuts[-1], d=8, e=8)
    first = states_of(layer, x, torch.float32)
    exact = first._replace(store=doubled(first.store))
    out, last, pullback = layer.extend_vjp(exact, **doubled(x), backend="reference")
    d_out = torch.randn(out.shape)
    d_last = {name: torch.randn(a.shape) for name, a in last.store.items()}
    expected, d_first = pullback(d_out.double(), doubled(d_last))

    cache, outs, pullbacks = first, [], []
    with small_tiles():
        for start, stop in pairwise(cuts):
            part = {name: a[:, start:stop] for name, a in x.items()}
            piece, cache, back = layer.extend_vjp(cache, **part, backend=BACKENDS)
            outs.append(piece)
            pullbacks.append((start, stop, back))
        d_state, result = d_last, []
        for start, stop, back in reversed(pullbacks):
            gradients, d_state = back(d_out[:, start:stop], d_state)
            result.insert(0, gradients)
    assert error(torch.cat(outs, dim=1), out) < 2e-6
    for name, state in last.store.items():
        assert error(cache.store[name], state) < 2e-6
        assert error(d_state[name], d_first[name]) < 4e-6
    for name, gradient in expected.items():
        assert error(torch.cat([each[name] for each in result], dim=1), gradient) < 4e-6, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer", ["gated_delta", "linear", "gla", "rwkv6", "gsa", "kda"])
def test_a_token_reads_and_writes_the_state_once(layer, dtype):
    """Several queries per state, several blocks of values, a closed gate."""
    layer = pa.parse(layer)
    x = {name: a.to(dtype) for name, a in problem(layer, 1, e=40, heads=(2, 4), b=2).items()}
    if "g" in x:
        x["g"][:, :, 0] = -1e4
    if "beta" in x:
        x["beta"][:] = 0.7
    cache = states_of(layer, x, torch.float32)
    exact = cache._replace(store=doubled(cache.store))
    expected, last = layer.extend(exact, **doubled(x), backend="reference")
    with small_tiles():
        out, new = layer.extend(cache, **x, backend=BACKENDS)
    assert error(out, expected) < BOUNDS[dtype]
    for name, state in last.store.items():
        assert error(new.store[name], state) < 2e-6
        assert new.store[name].dtype == torch.float32


def test_an_extension_of_sequences_of_unequal_lengths():
    layer = pa.GatedDelta()
    x = problem(layer, 18, b=2, heads=(1, 1))
    cache, lengths = states_of(layer, x, torch.float32), torch.tensor([18, 0])
    expected, last = layer.extend(cache, **x, lengths=lengths, backend="reference")
    with small_tiles():
        out, new = layer.extend(cache, **x, lengths=lengths, backend="triton")
    assert error(out, expected) < 1e-6
    for name, state in last.store.items():
        assert error(new.store[name], state) < 1e-6


@pytest.mark.parametrize("keys", ["clustered", "equal"])
def test_an_inverse_of_32_tokens_is_accurate(keys):
    """The Neumann series by repeated doubling would lose all digits."""
    k = problem(pa.Delta(), 32, heads=(1, 1), keys=keys)["k"][0, :, 0]
    strict = torch.tril(2 * k @ k.T, -1)
    result = torch.full((32, 32), torch.nan)
    with small_tiles():
        pieces.inverse[(1,)](strict, result, 32, 5)
    system = torch.eye(32).double() + strict.double()
    # The bound of float32 rounding; the error within it depends on the CPU's order of summation.
    bound = torch.linalg.cond(system) * 2.0**-24
    assert error(result, torch.linalg.inv(system)) < bound < 1e-4


@pytest.mark.parametrize("level", [0, 2, 3])
def test_a_sum_of_gates_has_the_digits_of_two_numbers_in_bfloat16(level):
    g = -torch.rand((16, 16), generator=torch.Generator().manual_seed(0))
    result = torch.full((16, 16), torch.nan)
    with small_tiles():
        pieces.gates_to_the_middle[(1,)](g, result, level, 16)
    blocks = g.double().reshape(-1, 2, 2**level, 16)
    first = blocks[:, 0].flip(1).cumsum(1).flip(1) - blocks[:, 0]
    expected = torch.stack((first, blocks[:, 1].cumsum(1)), 1).reshape(16, 16)
    assert error(result, expected) < 2.0**-15


def test_a_strong_gate_costs_later_weak_gates_no_accuracy():
    g = -torch.randn(64, generator=torch.Generator().manual_seed(0)).abs() * 1e-3
    g[5] = -150.0
    result = torch.full((64, 64), torch.nan)
    with small_tiles():
        pieces.decay_factors[(1,)](g, result, 64)
    total = g.double().cumsum(0)
    expected = torch.tril((total[:, None] - total).clamp_max(0).exp())
    assert error(result, expected) < 1e-6


@pytest.mark.parametrize(
    ("layer", "changes", "reason"),
    [
        ("gated_delta", {"k": (2, 20, 2, 264)}, "d=264"),
        ("gated_delta", {"v": (2, 20, 2, 520)}, "e=520"),
        ("gated_delta", {"v": (0, 20, 2, 8)}, "empty"),
        ("gsa", {"s": (2, 20, 2, 257)}, "m=257"),
        ("linear", dict.fromkeys("qkv", (40000, 20, 2, 8)), "65535 heads"),
        ("conditioned_query", {"k": (2, 20, 2, 300)}, "d=300"),
    ],
)
def test_unsupported_calls_are_declined_with_the_reason(layer, changes, reason):
    shape = (2, 20, 2, 8)
    shapes = {"q": shape, "k": shape, "v": shape} | changes
    leaf = pa.parse(layer) if layer != "conditioned_query" else pa.ConditionedQuery()
    request = Request("vjp", "torch", "cpu", "float32", tuple(shapes.items()), frozenset())
    refusal = Triton().refusal(leaf, request)
    assert reason in refusal
