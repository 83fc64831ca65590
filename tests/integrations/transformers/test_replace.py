"""A mechanism in models of many families: outputs, gradients, options of the model, files."""

import copy
from pkgutil import resolve_name
from unittest.mock import DEFAULT, Mock

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from safetensors.torch import load_file

import precondattn as pa
from precondattn.integrations.transformers import (
    replace_attention,
    restore_attention,
    static_cache,
)
from precondattn.integrations.transformers.attention import NAME
from precondattn.integrations.transformers.learned import learned_inputs
from tests.integrations.transformers.small_models import FAMILIES, model_of, prompts

IDS, MASK = prompts()
VALID = MASK.bool()


def attentions(model):
    return [layer.self_attn for layer in model.model.layers]


@pytest.mark.parametrize("family", [*FAMILIES, "Llama in float64"])
def test_softmax_gives_what_the_model_gives_and_its_gradients(family):
    """The labels are those of tokens that follow valid ones."""
    family, _, is_double = family.partition(" in float")
    results, labels = [], IDS.masked_fill(MASK.cumsum(1) < 2, -100)
    for is_ours in (False, True):
        model = model_of(family, torch.float64 if is_double else torch.float32)
        if is_double:  # Eager attention computes in float32.
            model.set_attn_implementation("sdpa")
        if is_ours:
            replace_attention(model, "softmax")
        out = model(IDS, attention_mask=MASK, labels=labels)
        out.loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        results.append(((out.logits[VALID].detach(), out.loss.detach()), gradients))
    bounds = {"rtol": 1e-9, "atol": 1e-12} if is_double else {"rtol": 1e-5, "atol": 2e-6}
    (found, of_ours), (expected, of_model) = results[::-1]
    torch.testing.assert_close(found, expected, **bounds)
    bounds = bounds if is_double else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(of_ours, of_model, **bounds)


def attention_by_hand(module, query, key, value, mask, scaling=None, dropout=0.0, **others):
    """LUCID with the model's rows and scale, for sequences without padding."""
    rows = (x.transpose(1, 2) for x in (query, key, value))
    return pa.Lucid(pa.Softmax(scale=scaling), scale=scaling)(*rows), None


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Granite"])
def test_lucid_is_lucid_with_the_model_s_rotation_and_scale(family, monkeypatch):
    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    model = model_of(family, dtype=torch.float64)
    with torch.no_grad():
        ours = replace_attention(model, "lucid")(IDS).logits
        restore_attention(model)
        monkeypatch.setitem(functions._local_mapping, "eager", attention_by_hand)
        by_hand = model(IDS).logits
    torch.testing.assert_close(ours, by_hand, rtol=1e-6, atol=1e-8)


@torch.no_grad()
def test_layers_have_mechanisms_of_their_own():
    model = replace_attention(model_of(), layers=["laser", pa.Lucid()])
    assert [str(m.precondattn.mechanism.name) for m in attentions(model)] == ["laser", "lucid"]
    both, first = (
        replace_attention(model_of(), layers=layers)(IDS).logits
        for layers in (["lucid"] * 2, ["lucid", "softmax"])
    )
    assert (both - first).abs().max() > 0.01


def test_a_window_a_cap_and_a_sink_stay():
    model = replace_attention(model_of("Gemma2"), "lucid")
    local, whole = (m.precondattn.mechanism.base for m in attentions(model))
    assert (local.window, whole.window) == (5, None)
    assert local.softcap == 50.0
    assert local.scale == 0.25
    model = replace_attention(model_of("GptOss"), "lucid")
    assert [m.precondattn.mechanism.base.sink for m in attentions(model)] == [True, True]


def test_a_temperature_is_a_parameter_which_trains_and_is_saved(tmp_path):
    model = model_of()
    plain = model(IDS).logits
    replace_attention(model, "temperature[per=head](lucid)")
    tau = attentions(model)[0].mechanism_inputs.tau
    assert tau.shape == (4,)
    tempered = model(IDS, labels=IDS)
    tempered.loss.backward()
    assert tau.grad.abs().min() > 0
    replace_attention(model, "lucid")
    torch.testing.assert_close(tempered.logits, model(IDS).logits, rtol=1e-5, atol=2e-6)
    assert not any("mechanism_inputs" in name for name, _ in model.named_parameters())
    torch.testing.assert_close(restore_attention(model)(IDS).logits, plain)

    replace_attention(model, "temperature[per=head]")
    with torch.no_grad():
        for module in attentions(model):
            module.mechanism_inputs.tau.normal_()
    model.save_pretrained(tmp_path)
    loaded = replace_attention(model_of(), "temperature[per=head]")
    weights = load_file(tmp_path / "model.safetensors")
    assert not loaded.load_state_dict(weights).missing_keys
    torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits)


@torch.no_grad()
def test_packed_position_ids_are_sequences_of_their_own():
    model = replace_attention(model_of("Mistral"), "lucid")
    positions = torch.cat([torch.arange(4), torch.arange(7)])[None]
    packed = model(IDS[:1], position_ids=positions, use_cache=False).logits
    alone = [model(part, use_cache=False).logits for part in (IDS[:1, :4], IDS[:1, 4:])]
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(("side", "mechanism"), [("left", "softmax"), ("right", "lucid(laser)")])
@torch.no_grad()
def test_padding_changes_nothing(side, mechanism):
    model, order = replace_attention(model_of(), mechanism), 1 if side == "left" else -1
    ids = torch.cat([torch.full((1, 3), 5), IDS[:1]][::order], 1)
    mask = torch.cat([torch.zeros(1, 3), torch.ones(1, 11)][::order], 1).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    padded = model(ids, attention_mask=mask, position_ids=positions).logits
    torch.testing.assert_close(padded[mask.bool()], model(IDS[:1]).logits[0], rtol=1e-5, atol=2e-6)


@torch.no_grad()
def test_a_copy_is_a_model_of_its_own_and_files_have_the_model_s_weights(tmp_path):
    model = replace_attention(model_of(), "lucid")
    copied = copy.deepcopy(model)
    restore_attention(model)
    assert copied.config._attn_implementation == NAME
    expected = copied(IDS).logits
    copied.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert loaded.config._attn_implementation != NAME
    torch.testing.assert_close(replace_attention(loaded, "lucid")(IDS).logits, expected)


def attributes_of(model):
    return [model.config._attn_implementation] + [
        (type(m), {n: [*v] if isinstance(v, dict) else id(v) for n, v in vars(m).items()})
        for m in model.modules()
    ]


@pytest.mark.parametrize(
    "change", [lambda m: replace_attention(m, "temperature"), restore_attention]
)
def test_a_change_that_is_interrupted_at_the_second_layer_is_undone(change, monkeypatch):
    model = replace_attention(model_of(), "temperature[per=head]")
    before, path = attributes_of(model), f"{replace_attention.__module__}._forget"
    works_once = Mock(wraps=resolve_name(path), side_effect=[DEFAULT, KeyboardInterrupt])
    monkeypatch.setattr(path, works_once)
    with pytest.raises(KeyboardInterrupt):
        change(model)
    assert attributes_of(model) == before


def test_print_shows_the_mechanism_of_each_layer_until_it_is_restored():
    model = model_of()
    before = str(model)
    replace_attention(model, layers=["softmax", "lucid"])
    replace_attention(model, layers=["lucid(laser)", "lucid"])
    shown = str(copy.deepcopy(model))
    assert shown.count("mechanism=") == 2
    assert shown.index("mechanism='lucid(laser") < shown.index("mechanism='lucid(softmax")
    assert str(restore_attention(model)) == before


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
@torch.no_grad()
def test_a_boolean_mask_of_pairs_gives_what_the_model_gives(family):
    model = model_of(family)
    model.set_attn_implementation("sdpa")
    torch.manual_seed(0)
    own = (torch.rand(2, 1, 11, 11) > 0.4).tril() | torch.eye(11, dtype=torch.bool)
    window = getattr(model.config, "sliding_window", None)
    if window:
        own &= torch.ones(11, 11, dtype=torch.bool).triu(1 - window)
    expected = model(IDS, attention_mask=own, use_cache=False).logits
    model = replace_attention(model, "softmax")
    found = model(IDS, attention_mask=own, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)
    # The cache of a window refuses it.
    caches = () if window else (transformers.DynamicCache(), static_cache(model, 14))
    for cache in caches:
        parts = []
        for start, stop in ((0, 5), (5, 9), (9, 11)):
            given = {"attention_mask": own[:, :, start:stop, :stop], "past_key_values": cache}
            parts.append(model(IDS[:, start:stop], **given).logits)
        torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_a_replaced_model_is_one_graph_without_a_mask_too(family):
    """Compiled code does not see whether position_ids are those of one sequence."""
    model = replace_attention(model_of(family, num_hidden_layers=1).eval(), "lucid")
    packed = torch.arange(IDS.shape[1])[None] % 3
    for given in ({}, {"position_ids": packed}, {"attention_mask": MASK}):
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        found = compiled(IDS, use_cache=False, **given).logits
        expected = model(IDS, use_cache=False, **given).logits
        torch.testing.assert_close(found, expected, msg=str(given))


def test_a_model_with_sinks_gives_them_and_learns_the_other_inputs():
    mechanism = pa.parse("temperature[per=head](softmax[sink=true])")
    for has_sink, names in ((True, ["tau"]), (False, ["sink", "tau"])):
        assert sorted(each.name for each in learned_inputs(mechanism, has_sink)) == names
