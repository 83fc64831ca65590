"""Weights and optimizer states from before linear maps were modules (`earlier/`) still load."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from precondattn.layers.recipes import Biased
from precondattn.layers.torch import VisionAttention, from_earlier
from tests.layers.earlier.make_fixtures import OF_FLAX, SIZES, TOKENS, decoder, steps
from tests.layers.layer_cases import MECHANISMS
from tests.layers.torch_layers import by_declared_axes, hidden, made

EARLIER = Path(__file__).parent / "earlier"


@pytest.fixture
def before():
    with np.load(EARLIER / "torch.npz") as entries:
        return {name: torch.tensor(entries[name]) for name in entries}


def of(before, prefix):
    return {n.removeprefix(prefix): array for n, array in before.items() if n.startswith(prefix)}


def entries_of(before):
    """The optimizer's entries by number, as its `state_dict` has them."""
    entries = {}
    for name, array in of(before, "state.").items():
        number, key = name.split(".")
        entries.setdefault(int(number), {})[key] = array
    return entries


def optimizer_of(parameters):
    return torch.optim.AdamW(parameters, 1e-2)


def in_earlier_layout(attn):
    return {
        f"inputs.{name}.{own}": array.detach().clone()
        for name, of_entry in by_declared_axes(attn).items()
        for own, array in of_entry.items()
    }


def test_a_seed_gives_the_first_values_that_it_gave_before(before):
    model, same = decoder(), decoder(seed=1)
    same.load_state_dict(of(before, "first."))
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, same.state_dict()[name]), name


def assert_goes_on(model, optimizer, before):
    losses = torch.tensor(steps(model, optimizer, 3), dtype=torch.float64)
    torch.testing.assert_close(losses, before["losses"], rtol=1e-9, atol=1e-9)


def test_training_goes_on_with_the_weights_and_the_optimizer_of_before(before):
    model = decoder(seed=1)
    model.load_state_dict(of(before, "weight."))
    optimizer = optimizer_of(model.parameters())
    count = len(optimizer.param_groups[0]["params"])
    options = {**optimizer.state_dict()["param_groups"][0], "params": [*range(count)]}
    saved = {"state": entries_of(before), "param_groups": [options]}
    optimizer.load_state_dict(from_earlier(saved, model, optimizer))
    assert_goes_on(model, optimizer, before)


def test_groups_of_an_optimizer_are_those_of_before(before):
    """Gains and the like have no decay, which here is 0, so that losses do not change."""
    model = decoder(seed=1)
    model.load_state_dict(of(before, "weight."))

    def is_decayed(name):
        return name.endswith(("weight", "gate", "up", "down", "projection", "bias"))

    numbers = [*enumerate(of(before, "weight."))]
    groups = [[i for i, name in numbers if is_decayed(name) is kind] for kind in (True, False)]
    entries, sorted_groups, moved = entries_of(before), [], {}
    for group in groups:
        first = len(moved)
        moved |= {first + k: entries[i] for k, i in enumerate(group)}
        sorted_groups.append([*range(first, len(moved))])
    named = [*model.named_parameters()]
    optimizer = optimizer_of(
        [{"params": [p for n, p in named if is_decayed(n) is kind]} for kind in (True, False)]
    )
    options = optimizer.state_dict()["param_groups"]
    saved = [{**of_g, "params": ids} for of_g, ids in zip(options, sorted_groups, strict=True)]
    state = from_earlier({"state": moved, "param_groups": saved}, model, optimizer)
    optimizer.load_state_dict(state)
    assert_goes_on(model, optimizer, before)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_distributed_checkpoint_of_before_is_read_by_names(before, tmp_path):
    model = decoder(seed=1)
    names, optimizer = [*of(before, "weight.")], optimizer_of(model.parameters())
    options = {**optimizer.state_dict()["param_groups"][0], "params": names}
    of_names = {names[i]: entries for i, entries in entries_of(before).items()}
    saved = {
        "model": of(before, "weight."),
        "optimizer": {"state": of_names, "param_groups": [options]},
    }
    checkpoint.save(saved, checkpoint_id=tmp_path / "before", no_dist=True)
    dcp_to_torch_save(tmp_path / "before", tmp_path / "before.pt")
    state = from_earlier(torch.load(tmp_path / "before.pt", weights_only=False), model)
    steps(model, optimizer, 1)
    get_state_dict(model, optimizer)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    assert_goes_on(model, optimizer, before)


@pytest.mark.parametrize("expression", MECHANISMS)
def test_a_state_dict_of_before_gives_the_same_layer(expression):
    attn, again = made(expression), made(expression)
    again.load_state_dict(in_earlier_layout(attn))
    x = hidden(1, 5)
    torch.testing.assert_close(again(x), attn(x), rtol=1e-12, atol=1e-12)


def test_biases_of_a_vision_layer_of_before_load_too():
    made_with = {"heads": 2, "recipes": {"out": Biased()}, "dtype": torch.float64}
    attn, again = VisionAttention(8, **made_with), VisionAttention(8, **made_with)
    for parameter in attn.parameters():
        torch.nn.init.normal_(parameter)
    saved = in_earlier_layout(attn)
    assert {"inputs.q.bias", "inputs.out.projection_bias"} < set(saved)
    again.load_state_dict(saved)
    for name, weight in attn.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name


def test_what_is_no_state_of_before_is_named(before):
    model = decoder()
    optimizer = optimizer_of(model.parameters())
    steps(model, optimizer, 1)
    now = optimizer.state_dict()
    with pytest.raises(TypeError, match="optimizer: a state with numbers in place of names needs"):
        from_earlier(now, model)
    with pytest.raises(ValueError, match=r"must have the shape .*, which the parameter had before"):
        from_earlier(now, model, optimizer)
    fewer = optimizer_of([*model.parameters()][:-1])
    with pytest.raises(ValueError, match=r"groups must have \[\d+\] parameters"):
        from_earlier(now, model, fewer)
    with pytest.raises(ValueError, match="it has parameters that are not of the model"):
        from_earlier(now, decoder(), optimizer)
    wrong = of(before, "weight.") | {"blocks.0.attention.inputs.q.weight": torch.zeros(3, 2)}
    with pytest.raises(RuntimeError, match=r"size mismatch for blocks\.0\.attention\.q_proj\.weig"):
        model.load_state_dict(wrong)


def nested(arrays):
    tree = {}
    for name, array in arrays.items():
        *path, last = (int(key) if key.isdecimal() else key for key in name.split("."))
        here = tree
        for key in path:
            here = here.setdefault(key, {})
        here[last] = array
    return tree


@pytest.mark.thorough
def test_a_decoder_of_flax_has_its_first_values_of_before_and_loads_orbax_of_before(tmp_path):
    nnx, jax = pytest.importorskip("flax.nnx"), pytest.importorskip("jax")
    orbax = pytest.importorskip("orbax.checkpoint")
    from precondattn.layers import flax as in_flax

    with np.load(EARLIER / "flax.npz") as saved:
        arrays = dict(saved)
    logits, tree = arrays.pop("logits"), nested(arrays)

    def made_with(seed):
        return in_flax.Decoder(**SIZES, layers=OF_FLAX, rngs=nnx.Rngs(seed))

    first, model = made_with(0), made_with(1)
    moments = jax.tree.map(lambda array: 2 * array, tree)
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "before", {"weights": tree, "moments": [{"mu": moments}]})
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "before")
    after = in_flax.from_earlier(restored, model)
    nnx.update(model, after["weights"])
    np.testing.assert_allclose(model(jax.numpy.asarray(TOKENS)), logits, rtol=1e-5, atol=1e-6)
    for of_first, of_model in zip(
        *(jax.tree.leaves(nnx.state(m, nnx.Param)) for m in (first, model)), strict=True
    ):
        np.testing.assert_allclose(of_first, of_model, rtol=1e-6)
    mu = after["moments"][0]["mu"]
    same = jax.tree.map(lambda a, b: np.array_equal(a, 2 * b), mu, after["weights"])
    assert all(jax.tree.leaves(same))
    with pytest.raises(ValueError, match=r"inputs\.q\.weight must have the shape .*, which it had"):
        in_flax.from_earlier(
            {"blocks": {0: {"attention": {"inputs": {"q": {"weight": np.ones(2)}}}}}}, model
        )
