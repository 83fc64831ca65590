"""`precondattn.layers.torch.Attention`: calls, caches, padding, gradients, and bad input."""

import pickle
from unittest.mock import Mock

import pytest

pytest.importorskip("torch")

import torch

import precondattn as pa
from precondattn.layers.apply import apply
from precondattn.layers.torch import Attention
from tests.layers.layer_cases import CAUSAL, MECHANISMS, layer
from tests.layers.torch_layers import FEW, by_declared_axes, hidden, made


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("expression", CAUSAL)
def test_any_split_of_a_sequence_gives_the_full_call(expression):
    attn, x = made(expression), hidden(2, 9)
    full = attn(x)
    assert full.shape == x.shape
    cache, parts = attn.init_cache(2, 12), []
    for start, stop in ((0, 4), (4, 5), (5, 9)):
        y, cache = attn(x[:, start:stop], cache=cache)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), full, rtol=1e-9, atol=1e-9)
    assert cache.length.tolist() == [9, 9]


@pytest.mark.parametrize("expression", MECHANISMS)
def test_recipes_are_functions_of_arrays_and_run_on_numpy_too(expression):
    attn, x = made(expression), hidden(2, 5)
    mask = torch.tensor([[False, False, True, True, True], [True, True, True, False, True]])
    weights = {
        name: {own: p.detach().numpy() for own, p in of_entry.items()}
        for name, of_entry in by_declared_axes(attn).items()
    }
    y, _ = apply(attn.plan, weights, x.numpy(), depth=attn.depth, mask=mask.numpy())
    torch.testing.assert_close(torch.tensor(y), attn(x, mask=mask).detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("expression", MECHANISMS)
def test_padding_anywhere_leaves_what_the_valid_tokens_give_alone(expression):
    attn, x = made(expression), hidden(3, 7)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0], [1, 0, 1, 0, 1, 1, 0]]) > 0
    x[~mask] = torch.nan
    y = attn(x, mask=mask)
    assert not y[~mask].any()
    for i in range(3):
        alone = attn(x[i, mask[i]][None])[0]
        torch.testing.assert_close(y[i, mask[i]], alone, rtol=1e-9, atol=1e-9)
    y.square().sum().backward()
    for name, parameter in attn.named_parameters():
        assert torch.isfinite(parameter.grad).all(), name


@pytest.mark.parametrize("expression", FEW)
def test_a_ragged_batch_with_a_cache_equals_each_sequence_alone(expression):
    attn, x = made(expression), hidden(2, 8)
    cache = attn.init_cache(2, 16)
    mask = torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1]]) > 0
    _, cache = attn(x[:, :5], cache=cache, mask=mask)
    assert cache.length.tolist() == [2, 5]
    y, cache = attn(x[:, 5:7], cache=cache, mask=torch.tensor([[True, True], [True, False]]))
    last, cache = attn(x[:, 7:], cache=cache)
    tokens = [[3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 7]]
    for i in range(2):
        alone = attn(x[i : i + 1, tokens[i]])[0]
        torch.testing.assert_close(last[i, 0], alone[-1], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(y[0], attn(x[:1, 3:7])[0, 2:], rtol=1e-9, atol=1e-9)


def test_the_cache_is_one_with_all_operations():
    attn, x = made("gated_delta"), hidden(2, 8)
    full = attn(x)
    _, cache = attn(x[:, :5], cache=attn.init_cache(2))
    assert isinstance(cache, pa.Cache)
    before = cache.snapshot()
    _, later = attn(x[:, 5:], cache=cache)
    y, _ = attn(x[:, 5:], cache=later.restore(before))
    torch.testing.assert_close(y, full[:, 5:])
    y, _ = attn(x[[1, 1, 0], 5:], cache=cache.reorder([1, 1, 0]))
    torch.testing.assert_close(y, full[[1, 1, 0], 5:])
    again = pa.Cache.from_state_dict(cache.state_dict())
    torch.testing.assert_close(attn(x[:, 5:], cache=again)[0], full[:, 5:])

    attn = made("lucid")
    _, cache = attn(x, cache=attn.init_cache(2, 8))
    y, _ = attn(x[:, 5:], cache=cache.crop(5).grow(20))
    torch.testing.assert_close(y, attn(x)[:, 5:])


@pytest.mark.parametrize("stop", [None, "execution.evaluation.updated", "layers.apply.joined"])
def test_a_donated_cache_gives_the_same_and_is_spent(stop, monkeypatch):
    attn, x = made("ccq(gated_delta)"), hidden(1, 6)
    with torch.no_grad():
        full = attn(x)
        _, cache = attn(x[:, :5], cache=attn.init_cache(1), donate=True)
        if stop is None:
            y, _ = attn(x[:, 5:], cache=cache, donate=True)
            torch.testing.assert_close(y, full[:, 5:])
        else:
            monkeypatch.setattr(f"precondattn.{stop}", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                attn(x[:, 5:], cache=cache, donate=True)
            monkeypatch.undo()
        with pytest.raises(ValueError, match="donated"):
            attn(x[:, 5:], cache=cache)


@pytest.mark.parametrize(
    "expression", ["softmax", "softmax[window=3]", "lucid", "gated_delta", "mlstm"]
)
def test_a_cache_made_in_inference_mode_is_continued_outside_it(expression):
    attn, x = made(expression), hidden(2, 7)
    full, first, last = attn(x)[:, 5:], x[:, 5:6], x[:, 6:]
    with torch.inference_mode():
        caches = [attn(x[:, :5], cache=attn.init_cache(2, 8))[1] for _ in range(3)]
        before = caches[2].snapshot()
    y, after = attn(first, cache=caches[0])
    y.sum().backward()
    torch.testing.assert_close(torch.cat([y, attn(last, cache=after)[0]], 1), full)
    with torch.no_grad():
        y, after = attn(first, cache=caches[1], donate=True)
        torch.testing.assert_close(torch.cat([y, attn(last, cache=after, donate=True)[0]], 1), full)
        after = caches[2].restore(before, donate=True)
        after = after.crop(5, donate=True) if after.can_crop else after
        torch.testing.assert_close(attn(x[:, 5:], cache=after, donate=True)[0], full)


def test_positions_can_be_given_to_interpolate():
    attn, x = made("softmax"), hidden(2, 6)
    t = torch.arange(6.0)
    torch.testing.assert_close(attn(x, positions=t), attn(x))
    torch.testing.assert_close(attn(x, positions=t[None].expand(2, 6) + 5), attn(x))
    assert not torch.allclose(attn(x, positions=t / 4), attn(x))
    mask = torch.tensor([[False, True, True, True, True, True]] * 2)
    shifted = attn(x, positions=t, mask=mask)[:, 1:]
    torch.testing.assert_close(shifted, attn(x[:, 1:]))


@pytest.mark.parametrize("expression", FEW)
def test_gradients_are_those_of_finite_differences(expression):
    attn, x = made(expression), hidden(1, 4).requires_grad_()
    y = torch.randn(1, 4, 24, dtype=torch.float64)
    (attn(x) * y).sum().backward()
    for name, parameter in [("x", x), *attn.named_parameters()]:
        direction = torch.randn_like(parameter)
        with torch.no_grad():
            values = []
            for sign in (1e-6, -1e-6):
                parameter += sign * direction
                values.append((attn(x) * y).sum())
                parameter -= sign * direction
        difference = (values[0] - values[1]) / 2e-6
        torch.testing.assert_close(
            (parameter.grad * direction).sum(), difference, rtol=1e-5, atol=1e-6, msg=name
        )


def test_a_layer_is_copied_and_pickled():
    attn, x = made("lucid(path)"), hidden(1, 5)
    again = pickle.loads(pickle.dumps(attn))
    assert torch.equal(again(x), attn(x))
    assert again.plan == attn.plan


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
    weight = attn.q_proj.weight
    assert abs(weight.std() * 512**0.5 - 1) < 0.02
    contraction = Attention(32, heads=4, mechanism="ccq").inputs["contraction"].bias
    torch.testing.assert_close(contraction.sigmoid(), torch.full((4,), 0.1))


@pytest.mark.parametrize("depth", [-1, 1.5, True, torch.tensor(1.5)], ids=str)
def test_a_wrong_depth_is_named(depth):
    with pytest.raises(ValueError, match="depth must be a whole number, 0 or above; found"):
        made("differential", depth=depth)


X = torch.zeros(2, 3, 24)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"x": X[..., :23]}, ValueError, r"x must have shape \(b, t, 24\).*found \(2, 3, 23\)"),
        ({"x": X[0]}, ValueError, "x must have shape"),
        ({"x": X.double()}, TypeError, "x must be float32, as the weights; found float64"),
        ({"x": X.numpy()}, TypeError, "x must be an array of torch; found ndarray"),
        ({"mask": torch.ones(2, 4) > 0}, ValueError, r"mask must have shape \(2, 3\)"),
        ({"mask": torch.ones(2, 3)}, TypeError, "mask must be a boolean array.*found float32"),
        ({"positions": torch.arange(4)}, ValueError, r"positions must have shape \(3,\)"),
        ({"cache": "state"}, TypeError, "cache must be from init_cache; found str"),
    ],
)
def test_bad_input_is_named_before_any_work(arguments, error, message):
    attn = layer(Attention, "gated_delta")
    with pytest.raises(error, match=message):
        attn(**{"x": X, **arguments})


def test_a_cache_of_another_layer_is_refused():
    attn, other = layer(Attention, "gated_delta"), layer(Attention, "gla")
    with pytest.raises(ValueError, match="cache is of another layer"):
        attn(X, cache=other.init_cache(2))
    with pytest.raises(ValueError, match="cache has 3 sequences, and x has 2"):
        attn(X, cache=attn.init_cache(3))
    wider = layer(Attention, "gated_delta", head_dim=8)
    with pytest.raises(ValueError, match="'convolution of q' must have shape"):
        attn(X, cache=wider.init_cache(2))
    with pytest.raises(ValueError, match="batch must be"):
        attn.init_cache(-1)
    softmax = layer(Attention, "softmax")
    with pytest.raises(TypeError, match="missing capacity"):
        softmax.init_cache(2)
    with pytest.raises(ValueError, match="capacity exceeded"):
        softmax(X, cache=softmax.init_cache(2, 2))
