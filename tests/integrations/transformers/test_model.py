"""`PrecondattnForCausalLM`: all that Transformers does with a model."""

import json

import pytest

pytest.importorskip("transformers")

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import precondattn as pa
from precondattn.integrations.transformers import PrecondattnCache, PrecondattnForCausalLM
from precondattn.layers.recipes import Rotary
from tests.integrations.transformers.small_models import (
    HYBRID,
    own_configuration,
    own_model,
    prompts,
)

IDS, MASK = prompts()


@pytest.fixture
def hybrid():
    return own_model(layer_types=HYBRID)


def logits(model, **options):
    return model(IDS, MASK, **options).logits


SAVED = {
    "lucid": {},
    "differential(path)": {},
    "softmax[sink=true,window=3]": {},
    "softmax": {"mlp": "plain"},
    "gla": {"tie_word_embeddings": False},
    "laser": {"tie_word_embeddings": True},
}


@pytest.mark.parametrize("mechanism", SAVED)
@torch.no_grad()
def test_a_saved_model_is_the_same_model_and_so_is_its_base(mechanism, tmp_path):
    model = own_model(mechanism, **SAVED[mechanism])
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] | info["unexpected_keys"]
    assert type(again) is PrecondattnForCausalLM
    assert torch.equal(logits(again), logits(model))
    is_tied = SAVED[mechanism].get("tie_word_embeddings", again.config.tie_word_embeddings)
    assert (again.lm_head.weight is again.model.embed_tokens.weight) is is_tied
    is_plain = SAVED[mechanism].get("mlp") == "plain"
    assert hasattr(again.model.layers[0].mlp, "gate_proj") is not is_plain
    states = AutoModel.from_pretrained(tmp_path)(IDS, MASK).last_hidden_state
    outputs = model(IDS, MASK, output_hidden_states=True)
    assert torch.equal(states, outputs.hidden_states[-1])
    assert len(outputs.hidden_states) == 3
    assert torch.equal(model.lm_head(states), outputs.logits)


def test_a_configuration_is_json_with_options_and_recipes(tmp_path):
    slow = Rotary(theta=500_000.0)
    config = own_configuration(
        layer_types=[pa.parse("lucid[scale=0.5]"), "softmax"],
        attention_arguments={"softmax": {"recipes": {"q": slow}, "kv_heads": 2}},
    )
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["layer_types"] == ["lucid[scale=0.5]", "softmax"]
    assert stored["attention_arguments"]["softmax"]["recipes"]["q"]["theta"] == 500_000.0
    assert again.attention_arguments == config.attention_arguments
    layers = PrecondattnForCausalLM(again).model.layers
    assert layers[1].attention.plan == PrecondattnForCausalLM(config).model.layers[1].attention.plan
    assert "500000" in repr(layers[1].attention)
    config = own_configuration("lucid", recipes=dict.fromkeys("qk", Rotary(theta=7.0)))
    config.save_pretrained(tmp_path)
    layers = PrecondattnForCausalLM(AutoConfig.from_pretrained(tmp_path)).model.layers
    assert all("theta = 7," in repr(layer.attention) for layer in layers)


def test_weights_that_a_file_lacks_start_as_declared_and_the_others_are_loaded(tmp_path):
    model = own_model("gla")
    missing = {name for name in model.state_dict() if "layers.1.attention.g_" in name}
    kept = {name: w for name, w in model.state_dict().items() if name not in missing}
    model.save_pretrained(tmp_path, state_dict=kept)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    for name, weight in model.state_dict().items():
        if name in missing:
            assert again[name].abs().max() < 3
        else:
            assert torch.equal(again[name], weight), name
    down = again["model.layers.1.attention.g_down_proj.weight"]
    assert 0.1 < down.std() < 0.4  # 24 terms: deviation 0.2.


def test_a_model_made_on_meta_takes_no_memory_until_it_is_filled():
    with torch.device("meta"):
        model = PrecondattnForCausalLM(own_configuration(layer_types=HYBRID))
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    model.init_weights()
    assert not any(parameter.isnan().any() for parameter in model.parameters())
    assert logits(model).isfinite().all()


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant, hybrid):
    model, calls = hybrid.train(), []

    def gradients():
        model.zero_grad()
        model(IDS, MASK, labels=IDS).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    plain = gradients()
    # Named anew in 5.23.
    new, old = "activation_checkpointing_enable", "gradient_checkpointing_enable"
    getattr(model, new if hasattr(model, new) else old)({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    for block in model.model.layers:
        block.attention.register_forward_hook(lambda *_: calls.append(1))
    for a, b in zip(plain, gradients(), strict=True):
        torch.testing.assert_close(a, b)
    assert len(calls) == 4  # Both layers are computed twice.
    with pytest.raises(ValueError, match="use_cache: gradient checkpointing"):
        model(IDS, use_cache=True)


def test_labels_give_the_loss_of_transformers_and_no_cache_is_made_where_gradients_are(hybrid):
    labels = IDS.masked_fill(MASK == 0, -100)
    outputs = hybrid(IDS, MASK, labels=labels)
    by_hand = torch.nn.functional.cross_entropy(
        outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    )
    torch.testing.assert_close(outputs.loss, by_hand)
    valid = (labels[:, 1:] != -100).sum()
    summed = hybrid(IDS, MASK, labels=labels, num_items_in_batch=2 * valid).loss
    torch.testing.assert_close(summed, by_hand / 2)
    assert outputs.past_key_values is None
    with torch.no_grad():
        assert hybrid(IDS).past_key_values.get_seq_length() == 11
        assert hybrid(IDS, use_cache=False).past_key_values is None


@pytest.mark.thorough
@torch.no_grad()
def test_compiled_it_gives_the_same_without_a_break_in_the_graph():
    model = own_model(layer_types=["gla", "softmax"])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found, expected = (logits(each, use_cache=False) for each in (compiled, model))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_device_map_places_the_weights_and_offloaded_ones_are_refused(tmp_path, hybrid):
    pytest.importorskip("accelerate")
    hybrid.save_pretrained(tmp_path)
    for device_map in ("auto", "cpu", {"": "cpu"}):
        again = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device_map)
        assert torch.equal(logits(again).cpu(), logits(hybrid))
    where = dict.fromkeys(("model.embed_tokens", "model.norm", "lm_head", "model.layers.0"), "cpu")
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        device_map={**where, "model.layers.1": "disk"},
        offload_folder=tmp_path / "offloaded",
    )
    with pytest.raises(RuntimeError, match="can not be offloaded"):
        again(IDS)


def test_half_precision_and_autocast(tmp_path, hybrid):
    hybrid.save_pretrained(tmp_path)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    tokens = half.generate(IDS, attention_mask=MASK, max_new_tokens=3)
    assert tokens.shape == (2, 14)
    assert half.dtype == logits(half).dtype == torch.bfloat16
    assert logits(half).isfinite().all()
    half.resize_token_embeddings(101, mean_resizing=False)
    assert logits(half).shape == (2, 11, 101)
    with torch.autocast("cpu", torch.bfloat16):
        hybrid(IDS, MASK, labels=IDS).loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in hybrid.parameters())


@torch.no_grad()
def test_a_model_takes_a_boolean_mask_of_pairs_and_a_prefix():
    model, prefix = own_model(layer_types=["softmax", "laser"]), torch.tensor([2, 4])
    pairs = (torch.rand(2, 1, 11, 11) > 0.4).tril()
    expected = model(IDS, attention_mask=pairs, prefix=prefix, use_cache=False).logits
    cache, parts = PrecondattnCache(model.config), []
    for start, stop in ((0, 5), (5, 6), (6, 11)):
        mask = pairs[:, :, start:stop, :stop]
        given = {"attention_mask": mask, "past_key_values": cache, "prefix": prefix}
        parts.append(model(IDS[:, start:stop], **given).logits)
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-5, atol=1e-4)

    # Generation sees the prefix of each prompt, also after padding.
    options = {"max_new_tokens": 4, "do_sample": False}
    found = model.generate(IDS, attention_mask=MASK, prefix=prefix, **options)
    for i, start in enumerate((0, 4)):
        alone = model.generate(IDS[i : i + 1, start:], prefix=prefix[i : i + 1], **options)
        torch.testing.assert_close(found[i : i + 1, start:], alone)
    assert not torch.equal(found, model.generate(IDS, attention_mask=MASK, **options))
