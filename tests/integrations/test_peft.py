"""Adapters of PEFT on the linear maps of our models."""

import pytest

pytest.importorskip("peft")
pytest.importorskip("transformers")

import peft
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from precondattn.integrations.transformers import PrecondattnConfig, PrecondattnForCausalLM
from precondattn.integrations.transformers import replace_attention as replace
from precondattn.layers.torch import Decoder

pytestmark = [
    pytest.mark.thorough,
    # PEFT calls what Transformers has renamed.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is dep:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning"),
]

LAYERS = ["gated_delta", "lucid", "mlstm"]
TOKENS = torch.arange(4 * 12).reshape(4, 12) * 7 % 31
ALL = {"target_modules": "all-linear", "r": 4}


def decoder():
    torch.manual_seed(0)
    return Decoder(31, 32, heads=4, layers=LAYERS)


def causal_lm():
    torch.manual_seed(0)
    sizes = {"vocab_size": 31, "hidden_size": 32, "num_attention_heads": 4}
    return PrecondattnForCausalLM(PrecondattnConfig(**sizes, layer_types=LAYERS)).eval()


def replaced():
    config = LlamaConfig(vocab_size=31, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    return replace(LlamaForCausalLM(config).eval(), "lucid")


def tuned_model(model, **options):
    return peft.get_peft_model(model, peft.LoraConfig(**ALL, **options))


def logits(model):
    y = model(TOKENS)
    return y if isinstance(y, torch.Tensor) else y.logits


@pytest.mark.parametrize("made", [decoder, causal_lm])
def test_lora_on_all_linear_maps_trains_reloads_and_merges(made, tmp_path):
    base = made()
    linear = {name for name, m in base.named_modules() if isinstance(m, nn.Linear)}
    maps, tuned = linear - {"lm_head"}, tuned_model(base)
    adapted = {
        name.removeprefix("base_model.model.")
        for name, module in tuned.named_modules()
        if isinstance(module, peft.tuners.lora.Linear)
    }
    assert adapted == maps
    assert {"q_proj", "beta_proj", "o_proj", "down_proj"} <= {m.split(".")[-1] for m in maps}

    adapters = [p for p in tuned.parameters() if p.requires_grad]
    assert len(adapters) == 2 * len(maps)
    optimizer = torch.optim.Adam(adapters, 3e-2)
    for _ in range(2):  # Only the second step moves the first factors.
        optimizer.zero_grad()
        logits(tuned).square().mean().backward()
        optimizer.step()
    assert all(p.grad.abs().sum() > 0 for p in adapters)

    with torch.no_grad():
        expected = logits(tuned)
        tuned.save_pretrained(tmp_path)
        again = peft.PeftModel.from_pretrained(made(), tmp_path)
        torch.testing.assert_close(logits(again), expected)
        assert not torch.allclose(logits(made()), expected, atol=1e-2)
        merged = tuned.merge_and_unload()
        assert type(merged) is type(base)
        assert all(type(merged.get_submodule(name)) is nn.Linear for name in maps)
        torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-5)


def test_transformers_loads_a_folder_of_an_adapter(tmp_path):
    """`from_pretrained` of the adapter's folder, `load_adapter` of a model, and a merged one."""
    causal_lm().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    before = {name: p.clone() for name, p in base.named_parameters()}
    tuned = tuned_model(base, init_lora_weights=False)
    tuned.save_pretrained(tmp_path / "adapter")
    expected = logits(tuned)

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert type(loaded) is PrecondattnForCausalLM
    torch.testing.assert_close(logits(loaded), expected)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model.load_adapter(tmp_path / "adapter")
    torch.testing.assert_close(logits(model), expected)
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            assert torch.equal(parameter, before[name.replace(".base_layer", "")]), name
    tuned.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_an_adapted_decoder_generates_and_is_compiled():
    tuned = tuned_model(decoder(), init_lora_weights=False)
    new = tuned.generate(TOKENS[:, :4], 3)
    whole = tuned(torch.cat([TOKENS[:, :4], new], 1)).argmax(-1)
    assert torch.equal(whole[:, 3:-1], new)
    torch._dynamo.reset()
    compiled = torch.compile(tuned, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(TOKENS), tuned(TOKENS), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("made", "way"), [(causal_lm, peft.PromptTuningConfig), (replaced, peft.PromptEncoderConfig)]
)
def test_virtual_tokens_with_their_mask_of_floats_are_trained_and_generate(made, way):
    tuned = peft.get_peft_model(made(), way(task_type="CAUSAL_LM", num_virtual_tokens=3))
    mask = torch.ones_like(TOKENS)
    mask[0, :4] = 0
    tuned(TOKENS, attention_mask=mask, labels=TOKENS).loss.backward()
    assert all(p.grad.abs().sum() > 0 for p in tuned.prompt_encoder.parameters())
    given = {"input_ids": TOKENS, "attention_mask": mask, "max_new_tokens": 4}
    assert torch.equal(tuned.generate(**given), tuned.generate(**given, use_cache=False))
    base = made()
    assert torch.equal(base(TOKENS, mask.float()).logits, base(TOKENS, mask).logits)
    with pytest.raises(ValueError, match="must have 1 for tokens and 0 for padding"):
        base(TOKENS, mask * 0.5)
    prefix = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises((TypeError, ValueError), match="its prompt tuning and P-tuning can"):
        peft.get_peft_model(base, prefix)(TOKENS)
