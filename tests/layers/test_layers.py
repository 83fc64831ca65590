"""Attention layers of PyTorch: each recipe on NumPy, padded, packed and in parts; their caches."""

import pickle
from unittest.mock import Mock

import pytest

pytest.importorskip("torch")

import numpy as np
import pytest
import torch

import precondattn as pa
from precondattn.layers.apply import apply
from precondattn.layers.checks import LayerCall
from precondattn.layers.recipes import Convolution, Rotary
from precondattn.layers.torch import Attention, Block, Decoder
from tests.layers.layer_cases import CAUSAL, MECHANISMS
from tests.layers.torch_layers import by_declared_axes, hidden, in_flax, made

COUNTS, BOUNDS = (3, 1, 5, 2), (0, 3, 4, 9, 11)
IDS = torch.tensor([[7, 7, 7, 0, 4, 4, 4, 4, 4, 9, 9], [0] * 11])
PARTS = (0, 5), (5, 5), (5, 6), (6, 9)
"""One part has no tokens."""


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def close(found, expected, tolerance=1e-9):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("expression", MECHANISMS)
def test_a_layer_is_a_function_of_weights_and_valid_tokens_and_runs_on_numpy_too(expression):
    attn, x = made(expression), hidden(3, 7)
    weights = {name: 1.5 * p.detach() for name, p in attn.named_parameters()}
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0], [1, 0, 1, 0, 1, 1, 0]]) > 0
    x[~mask] = torch.nan
    y = torch.func.functional_call(attn, weights, (x,), {"mask": mask})
    assert not y[~mask].any()
    with torch.no_grad():
        for parameter in attn.parameters():
            parameter *= 1.5
    for i in range(3):
        close(y[i, mask[i]], attn(x[i, mask[i]][None])[0])
    of_numpy = {
        name: {own: p.detach().numpy() for own, p in of_entry.items()}
        for name, of_entry in by_declared_axes(attn).items()
    }
    call = LayerCall(x.numpy(), mask.numpy())
    found = apply(attn.plan, of_numpy, call, depth=attn.depth)
    close(torch.tensor(found), y)
    attn(x, mask=mask).square().sum().backward()
    for name, parameter in attn.named_parameters():
        assert torch.isfinite(parameter.grad).all(), name


@pytest.mark.parametrize("expression", MECHANISMS)
def test_each_segment_gives_what_it_gives_alone(expression):
    """Tokens after the last of `cu_seqlens` are padding."""
    attn, x, cotangent = made(expression), hidden(2, 14), hidden(2, 11)
    x[:, 11:] = torch.nan
    parameters, packed = [*attn.parameters()], x[:, :11]
    alone = torch.cat([attn(part) for part in packed[:1].split(COUNTS, 1)], 1)
    expected = torch.cat([alone, attn(packed[1:])])
    rows = [torch.autograd.grad(expected[i], parameters, cotangent[i], True) for i in (0, 1)]
    y = attn(packed, segment_ids=IDS)
    close(y, expected)
    both = tuple(map(torch.add, *rows))
    close(torch.autograd.grad(y, parameters, cotangent), both, 1e-8)

    first = x[:1].clone().requires_grad_()
    y = attn(first, cu_seqlens=torch.tensor(BOUNDS))
    close(y[:, :11], alone)
    assert not y[:, 11:].any()
    d_x, *gradients = torch.autograd.grad(y[:, :11], [first, *parameters], cotangent[:1])
    close(tuple(gradients), rows[0], 1e-8)
    assert d_x[:, :11].isfinite().all()
    assert not d_x[:, 11:].any()

    packed[0, 4:9] = torch.nan
    y = attn(packed, segment_ids=IDS)
    for kept in (slice(0, 4), slice(9, 11)):
        close(y[0, kept], alone[0, kept])


@pytest.mark.parametrize("expression", CAUSAL)
def test_any_split_of_ragged_sequences_gives_each_alone(expression):
    attn, x = made(expression), hidden(2, 9)
    ragged = torch.tensor([[0, 0, 0, 1, 1, 1, 0, 1, 1], [1] * 9]) > 0
    for mask in (ragged, None):
        cache, parts = attn.init_cache(2, 12), []
        for start, stop in PARTS:
            now = None if mask is None else mask[:, start:stop]
            y, cache = attn(x[:, start:stop], cache=cache, mask=now)
            parts.append(y)
        valid = torch.ones_like(ragged) if mask is None else mask
        for i, row in enumerate(torch.cat(parts, 1)):
            close(row[valid[i]], attn(x[i, valid[i]][None])[0])
        assert cache.length.tolist() == valid.sum(1).tolist()


@pytest.mark.parametrize("expression", ["softmax[causal=false]", "lucid(path)", "ssd", "dplr"])
def test_a_layer_of_no_tokens_or_no_sequences_has_gradients_of_zero(expression):
    attn = made(expression)
    for shape in ((0, 3, 24), (2, 0, 24)):
        x = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
        y = attn(x, mask=torch.ones(shape[:2], dtype=torch.bool))
        assert y.shape == shape
        gradients = torch.autograd.grad(y.sum(), (x, *attn.parameters()))
        assert not any(gradient.any() for gradient in gradients)


def test_the_cache_is_one_with_all_operations():
    attn, x = made("gated_delta"), hidden(2, 8)
    full, (_, cache) = attn(x)[:, 5:], attn(x[:, :5], cache=attn.init_cache(2))
    assert isinstance(cache, pa.Cache)
    before = cache.snapshot()
    _, later = attn(x[:, 5:], cache=cache)
    for again in (later.restore(before), pa.Cache.from_state_dict(cache.state_dict())):
        close(attn(x[:, 5:], cache=again)[0], full)
    close(attn(x[[1, 1, 0], 5:], cache=cache.reorder([1, 1, 0]))[0], full[[1, 1, 0]])
    attn = made("lucid")
    _, cache = attn(x, cache=attn.init_cache(2, 8))
    close(attn(x[:, 5:], cache=cache.crop(5).grow(20))[0], attn(x)[:, 5:])


@pytest.mark.parametrize("stop", [None, "execution.evaluation.updated", "layers.apply.joined"])
def test_a_donated_cache_gives_the_same_and_is_spent(stop, monkeypatch):
    attn, x = made("ccq(gated_delta)"), hidden(1, 6)
    with torch.no_grad():
        _, cache = attn(x[:, :5], cache=attn.init_cache(1), donate=True)
        if stop is None:
            y, _ = attn(x[:, 5:], cache=cache, donate=True)
            close(y, attn(x)[:, 5:])
        else:
            monkeypatch.setattr(f"precondattn.{stop}", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                attn(x[:, 5:], cache=cache, donate=True)
            monkeypatch.undo()
        with pytest.raises(ValueError, match="donated"):
            attn(x[:, 5:], cache=cache)


@pytest.mark.parametrize("expression", ["softmax[window=3]", "lucid", "gated_delta"])
def test_a_cache_made_in_inference_mode_is_continued_outside_it(expression):
    attn, x = made(expression), hidden(2, 7)
    full, first, last = attn(x)[:, 5:], x[:, 5:6], x[:, 6:]
    with torch.inference_mode():
        caches = [attn(x[:, :5], cache=attn.init_cache(2, 8))[1] for _ in range(3)]
        before = caches[2].snapshot()
    y, after = attn(first, cache=caches[0])
    y.sum().backward()
    close(torch.cat([y, attn(last, cache=after)[0]], 1), full)
    with torch.no_grad():
        y, after = attn(first, cache=caches[1], donate=True)
        close(torch.cat([y, attn(last, cache=after, donate=True)[0]], 1), full)
        after = caches[2].restore(before, donate=True)
        after = after.crop(5, donate=True) if after.can_crop else after
        close(attn(x[:, 5:], cache=after, donate=True)[0], full)


def assert_same(cache, expected):
    assert cache.kinds == expected.kinds
    assert cache.length.tolist() == expected.length.tolist()
    for name, buffer in expected.store.items():
        torch.testing.assert_close(cache.store[name], buffer, atol=1e-10, rtol=0, msg=name)


@pytest.mark.parametrize("mechanism", ["gated_delta", "ssd", "lucid", "ccq(softmax)"])
@torch.no_grad()
def test_a_layer_goes_back_to_tokens_that_it_kept(mechanism):
    options = {"recipes": {"v": Convolution(size=4)}} if mechanism == "lucid" else {}
    attn = Attention(16, heads=2, mechanism=mechanism, dtype=torch.float64, **options)
    x, mask = hidden(2, 14, 16), torch.ones(2, 14, dtype=torch.bool)
    mask[0, [2, 5, 13]] = False
    _, start = attn(x[:, :3], mask=mask[:, :3], cache=attn.init_cache(2, 20))

    def rest(mask, **options):
        return attn(x[:, 3:], mask=mask[:, 3:], cache=start, **options)

    y, longer = rest(mask, states_every=4)
    expected, plain = rest(mask)
    close(y, expected)
    assert_same(longer.crop(longer.length), plain)
    of_eight = mask & (mask.cumsum(1) <= 8)
    assert_same(longer.crop([8, 8]), rest(of_eight)[1])
    _, longer = rest(mask, keep=5)
    left = mask & (mask.cumsum(1) <= torch.tensor([[7], [12]]))
    assert_same(longer.crop([7, 12]), rest(left)[1])
    assert_same(attn(x[:, :1], cache=longer)[1], attn(x[:, :1], cache=plain)[1])


def test_positions_can_be_given_to_interpolate():
    attn, x = made("softmax"), hidden(2, 6)
    t = torch.arange(6.0)
    close(attn(x, positions=t), attn(x))
    close(attn(x, positions=t[None].expand(2, 6) + 5), attn(x))
    assert not torch.allclose(attn(x, positions=t / 4), attn(x))
    mask = torch.tensor([[False, True, True, True, True, True]] * 2)
    close(attn(x, positions=t, mask=mask)[:, 1:], attn(x[:, 1:]))


def test_a_packed_decoder_is_compiled_and_that_of_flax_gives_the_same():
    quick = [{"mechanism": "linear", "recipes": {"q": Rotary(), "k": Convolution()}}]
    torch._dynamo.reset()
    model, tokens = Decoder(50, 24, heads=4, layers=quick), torch.randint(50, (1, 11))
    expected = torch.cat([model(part) for part in tokens.split(COUNTS, 1)], 1)
    close(model(tokens, cu_seqlens=BOUNDS), expected, 1e-5)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    close(compiled(tokens, segment_ids=IDS[:1]), expected, 1e-5)

    nnx, jnp = pytest.importorskip("flax.nnx"), pytest.importorskip("jax.numpy")
    same = in_flax(model, 50, 24, heads=4, layers=quick)
    call = nnx.jit(lambda m, tokens, ids: m(tokens, segment_ids=ids))
    logits = call(same, jnp.asarray(tokens), jnp.asarray(IDS[:1]))
    close(torch.tensor(logits.tolist()), expected.detach(), 1e-5)


def test_print_shows_mechanism_recipes_and_parameters():
    shown = repr(Attention(512, heads=8, mechanism="ccq(gated_delta)"))
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert lines[0] == "Attention(512, mechanism='ccq(gated_delta)')"
    assert lines[4].startswith("g b s u 4,112 -e^{A_log} softplus(W x + b)")
    assert lines[5] == "beta b s u 4,096 f sigma(W x), f = 1"
    assert lines[8] == "1,325,656 parameters in all"


def test_first_values_are_those_of_the_papers():
    attn = Attention(512, heads=64, head_dim=8, mechanism="gated_delta")
    step = torch.nn.functional.softplus(attn.inputs["g"].dt_bias)
    assert 0.001 <= step.min() < 0.004
    assert 0.02 < step.max() <= 0.1001
    rate = attn.inputs["g"].A_log.exp()
    assert rate.min() < 3
    assert 12 < rate.max() <= 16
    assert abs(attn.q_proj.weight.std() * 512**0.5 - 1) < 0.02
    contraction = Attention(32, heads=4, mechanism="ccq").inputs["contraction"].bias
    torch.testing.assert_close(contraction.sigmoid(), torch.full((4,), 0.1))


SOFTMAX = "q_proj.weight k_proj.weight v_proj.weight o_proj.weight"
NAMES = {
    "softmax": SOFTMAX,
    "gated_delta": (
        f"{SOFTMAX} inputs.q.convolution inputs.k.convolution inputs.v.convolution g_proj.weight "
        "inputs.g.dt_bias inputs.g.A_log beta_proj.weight inputs.out.gain o_gate_proj.weight"
    ),
    "path[forget=scaled]": (
        f"{SOFTMAX} w_down_proj.weight w_up_proj.weight inputs.w.convolution beta_proj.weight "
        "beta_proj.bias g_proj.weight g_proj.bias"
    ),
}


@pytest.mark.parametrize("expression", NAMES)
def test_names_of_a_state_dict_stay_also_of_a_pickled_layer(expression):
    again = pickle.loads(pickle.dumps(made(expression)))
    assert set(again.state_dict()) == set(NAMES[expression].split())


B, T, WIDTH, HEADS = 2, 12, 16, 4
PREFIX = torch.tensor([3, 5])
LOWER = torch.ones(T, T, dtype=torch.bool).tril()
FIRST = (torch.arange(T) < PREFIX[:, None])[:, None, None]
PAIRS = torch.rand(B, HEADS, T, T, generator=torch.Generator().manual_seed(1)) > 0.4
OF_TWO_LAYERS = {"heads": HEADS, "layers": ["softmax", "laser"]}


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(B, T, WIDTH, dtype=torch.float64)


def wide_layer(mechanism="softmax", of=Attention):
    return of(WIDTH, heads=HEADS, kv_heads=2, mechanism=mechanism, dtype=torch.float64)


def test_a_prefix_is_the_mask_of_a_layer_without_causality(x):
    attn, full = wide_layer(), wide_layer("softmax[causal=false]")
    full.load_state_dict(attn.state_dict())
    torch.testing.assert_close(attn(x, prefix=PREFIX), full(x, attn_mask=LOWER | FIRST))
    torch.testing.assert_close(attn(x, attn_mask=PAIRS), full(x, attn_mask=LOWER & PAIRS))
    assert not torch.allclose(attn(x, prefix=PREFIX), attn(x))


def test_of_padded_or_packed_sequences_the_masks_are_those_of_each_alone(x):
    attn, mask = wide_layer(), torch.rand(B, T) > 0.3
    y = attn(x[:1], cu_seqlens=[0, 5, 12], prefix=[2, 4])
    for start, stop, prefix in ((0, 5, 2), (5, 12, 4)):
        alone = attn(x[:1, start:stop], prefix=[prefix])
        torch.testing.assert_close(y[:, start:stop], alone)
    x[~mask] = torch.nan
    y = attn(x, mask=mask, attn_mask=PAIRS, prefix=PREFIX)
    for i, valid in enumerate(mask):
        pairs = PAIRS[i : i + 1][:, :, valid][..., valid]
        alone = attn(x[i : i + 1, valid], attn_mask=pairs, prefix=PREFIX[i : i + 1])
        torch.testing.assert_close(y[i : i + 1, valid], alone)
    assert not y[~mask].any()


@pytest.mark.parametrize("of", [Attention, Block])
def test_decoding_with_masks_of_pairs_gives_the_full_call(of, x):
    module = wide_layer(of=of)
    attn = module if of is Attention else module.attention
    expected = module(x, attn_mask=PAIRS, prefix=PREFIX)
    cache, outs = attn.init_cache(B, T), []
    for start, stop in ((0, 6), (6, 7), (7, T)):
        given = {"prefix": PREFIX} if start == 0 else {}  # Later steps need not name it.
        pairs = PAIRS[:, :, start:stop, :stop]
        y, cache = module(x[:, start:stop], attn_mask=pairs, cache=cache, **given)
        outs.append(y)
    torch.testing.assert_close(torch.cat(outs, 1), expected)


def test_a_decoder_generates_after_a_prefix():
    torch.manual_seed(0)
    model, prompt = (
        Decoder(50, WIDTH, dtype=torch.float64, **OF_TWO_LAYERS),
        torch.randint(50, (B, 6)),
    )
    found = model.generate(prompt, 4, prefix=PREFIX)
    longer = prompt
    for i in range(4):
        logits = model(longer, prefix=PREFIX)
        torch.testing.assert_close(logits[:, -1].argmax(-1), found[:, i])
        longer = torch.cat([longer, found[:, i : i + 1]], 1)


@pytest.mark.thorough
def test_flax_layers_give_what_those_of_torch_give():
    jnp = pytest.importorskip("jax.numpy")
    torch.manual_seed(0)
    model = Decoder(50, WIDTH, dtype=torch.float64, **OF_TWO_LAYERS)
    other = in_flax(model, 50, WIDTH, dtype=jnp.float64, **OF_TWO_LAYERS)
    ids, mask = torch.randint(50, (B, T)), torch.rand(B, T) > 0.2
    given = {"mask": mask, "attn_mask": PAIRS, "prefix": PREFIX}
    found = other(jnp.asarray(ids), **{name: jnp.asarray(a) for name, a in given.items()})
    np.testing.assert_allclose(found, model(ids, **given).detach(), atol=1e-10)
    found = other.generate(jnp.asarray(ids), 3, prefix=jnp.asarray(PREFIX))
    np.testing.assert_array_equal(found, model.generate(ids, 3, prefix=PREFIX))
