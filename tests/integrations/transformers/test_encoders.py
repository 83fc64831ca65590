"""Encoders, whose softmax is not causal, and models with distances (MPT's slopes, T5's table)."""

import copy

import pytest

pytest.importorskip("transformers")

import pytest
import torch
import transformers
from transformers import MptConfig, T5Config
from transformers.models.mpt.modeling_mpt import MptModel
from transformers.models.t5.modeling_t5 import T5Model

import precondattn as pa
from precondattn.integrations.transformers import replace_attention, restore_attention
from precondattn.integrations.transformers.attention import OF_ENCODER
from precondattn.layers.torch import Attention
from tests.integrations.transformers import small_models
from tests.integrations.transformers.small_models import prompts

NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
TEXT = {**SIZES, "vocab_size": 97, "pad_token_id": 0}
IMAGES = {**SIZES, "image_size": 12, "patch_size": 4}
DISTIL = {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}
FAMILIES = {
    "Bert": TEXT,
    "Roberta": TEXT,
    "Electra": {**TEXT, "embedding_size": 16},
    "DistilBert": {**DISTIL, "vocab_size": 97, "pad_token_id": 0, **NO_DROPOUT},
    "ViT": IMAGES,
    "Dinov2": IMAGES,
}


def model_of(family, dtype=torch.float64, **options):
    """A random model, the same in every call, whose attention is far from uniform."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**FAMILIES[family], **options})
    model = getattr(transformers, f"{family}Model")(config).to(dtype).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(5 if weight.ndim > 1 else 1)
    return model


def inputs_of(family):
    """A batch, and which of its tokens are valid: of text, the second has padding at the right."""
    generator = torch.Generator().manual_seed(1)
    if "image_size" in FAMILIES[family]:
        pixels = torch.randn(2, 3, 12, 12, generator=generator, dtype=torch.float64)
        return {"pixel_values": pixels}, torch.ones(2, 10, dtype=torch.bool)
    ids = torch.randint(3, 97, (2, 11), generator=generator)
    ids[1, 7:] = 0
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}, ids != 0


def states(model, given):
    return model(**given).last_hidden_state


@pytest.mark.parametrize("family", FAMILIES)
def test_softmax_gives_what_the_encoder_gives_and_its_gradients(family):
    model, (given, valid) = model_of(family), inputs_of(family)
    ours = replace_attention(copy.deepcopy(model), "softmax")
    results = []
    for each in (model, ours):
        found = states(each, given)[valid]
        found.square().sum().backward()
        results.append((found.detach(), {n: p.grad for n, p in each.named_parameters()}))
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-8)
    assert ours.config._attn_implementation == OF_ENCODER
    restored = states(restore_attention(ours), given)
    assert torch.equal(restored, states(model, given))


@pytest.mark.parametrize("mechanism", ["lucid", "laser", "row_normalized"])
def test_a_layer_is_the_mechanism_of_its_rows_and_ignores_padding(mechanism):
    model, (given, valid) = replace_attention(model_of("Bert"), mechanism), inputs_of("Bert")
    calls = []
    module = model.encoder.layer[0].attention.self
    for name in ("query", "key", "value"):
        getattr(module, name).register_forward_hook(lambda m, x, y: calls.append(y))
    module.register_forward_hook(lambda m, x, y: calls.append(y[0]))
    found = states(model, given)
    q, k, v = (x.unflatten(-1, (4, 8)) for x in calls[:3])
    of_rows = pa.parse(f"{mechanism}(softmax[causal=false])")
    expected = of_rows(q, k, v, lengths=valid.sum(1)).flatten(2)
    torch.testing.assert_close(calls[3][valid], expected[valid], rtol=1e-6, atol=1e-8)
    alone = states(model, {"input_ids": given["input_ids"][1:, :7]})
    torch.testing.assert_close(found[1:, :7], alone, rtol=1e-6, atol=1e-8)


def test_an_encoder_may_say_that_it_is_not_causal_and_have_a_mechanism_for_each_layer():
    given, _ = inputs_of("Bert")
    expected = states(replace_attention(model_of("Bert"), "laser"), given)
    said = replace_attention(model_of("Bert"), "laser(softmax[causal=false])")
    assert torch.equal(states(said, given), expected)
    mixed = replace_attention(said, layers=["softmax", "row_normalized"])
    names = [str(layer.attention.self.precondattn.mechanism) for layer in mixed.encoder.layer]
    assert [name.partition("(")[0].partition("[")[0] for name in names] == [
        "softmax",
        "row_normalized",
    ]
    assert all("causal=false" in name for name in names)


def test_what_is_causal_only_and_other_encoders_are_refused_with_the_reason():
    model = model_of("Bert")
    with pytest.raises(TypeError, match="without causality, lucid needs a unit diagonal"):
        replace_attention(model, "lucid[normalize=rows]")
    assert model.config._attn_implementation == "sdpa"
    sizes = {"d_model": 8, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    for name in ("layers", "attention_heads"):
        sizes |= {f"{side}_{name}": 2 for side in ("encoder", "decoder")}
    bart = transformers.BartModel(transformers.BartConfig(vocab_size=9, **sizes))
    with pytest.raises(TypeError, match="has both, and attention from one to the other"):
        replace_attention(bart, "softmax")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    ids = {f"{name}_token_id": i for i, name in enumerate(("pad", "bos", "eos", "cls", "sep"))}
    config = transformers.ModernBertConfig(vocab_size=9, num_attention_heads=2, **sizes, **ids)
    with pytest.raises(TypeError, match="in each of 1 layers expected; ModernBertModel has 0"):
        replace_attention(transformers.ModernBertModel(config), "softmax")


def test_a_boolean_mask_of_pairs_is_that_of_the_model_and_numbers_are_refused():
    model, (given, _) = replace_attention(model_of("Bert"), "softmax"), inputs_of("Bert")
    pairs = torch.ones(2, 1, 11, 11, dtype=torch.bool).tril()
    found, expected = (
        each(given["input_ids"], attention_mask=pairs).last_hidden_state
        for each in (model, model_of("Bert"))
    )
    torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match="a boolean mask of your own"):
        model(given["input_ids"], attention_mask=torch.where(pairs, 0.0, -0.5))


def test_a_decoder_that_its_configuration_calls_bidirectional_is_an_encoder():
    ids, mask = prompts()
    model = small_models.model_of("Llama", dtype=torch.float64, is_causal=False)
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
        ours = replace_attention(model, "softmax")
        found = ours(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
        with pytest.raises(ValueError, match="is not causal, so it can not have a cache"):
            ours(ids, attention_mask=mask, use_cache=True)
    local = small_models.model_of("Gemma3", use_bidirectional_attention=True)
    with pytest.raises(ValueError, match="an encoder with a window of 3"):
        replace_attention(local, "softmax")


def test_bert_as_a_decoder_is_causal():
    model, (given, valid) = model_of("Bert", is_decoder=True), inputs_of("Bert")
    expected = states(model, given)[valid]
    found = states(replace_attention(model, "softmax"), given)[valid]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
    states(replace_attention(model, "lucid"), given)


HEADS, WIDTH = 6, 48
"""Sizes with a number of heads that is not a power of 2, so that slopes have two series."""


@pytest.fixture
def ids():
    torch.manual_seed(0)
    return torch.randint(3, 97, (2, 150))


def recorded(model, module, **given):
    """The arguments and the output of an attention module in a call of its model."""
    found = []
    module.register_forward_hook(
        lambda module, first, named, result: found.extend([first, named, result[0]]),
        with_kwargs=True,
    )
    with torch.no_grad():
        model.eval()(**given)
    return found


def output(mechanism, weights, x):
    """The output of a layer with these weights, of which it has no others."""
    attn = Attention(WIDTH, heads=HEADS, mechanism=mechanism)
    attn.load_state_dict(weights)
    with torch.no_grad():
        return attn(x)


def test_mpt_is_softmax_with_slopes(ids):
    config = MptConfig(vocab_size=97, d_model=WIDTH, n_layers=2, n_heads=HEADS)
    model = MptModel(config)
    mpt = model.blocks[1].attn
    first, named, expected = recorded(model, mpt, input_ids=ids)
    x = first[0] if first else named["hidden_states"]
    matrices = (*mpt.Wqkv.weight.chunk(3), mpt.out_proj.weight)
    weights = {f"{n}_proj.weight": a for n, a in zip("qkvo", matrices, strict=True)}
    found = output("softmax[distance=slopes]", weights, x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_t5_is_softmax_with_buckets_and_without_a_scale(ids, side):
    sizes = {"d_model": WIDTH, "d_kv": WIDTH // HEADS, "num_heads": HEADS, "d_ff": 16}
    config = T5Config(vocab_size=97, num_layers=2, **sizes)
    model = T5Model(config)
    blocks = getattr(model, side).block
    t5, table = (blocks[i].layer[0].SelfAttention for i in (1, 0))  # Layers share a table.
    first, named, expected = recorded(model, t5, input_ids=ids, decoder_input_ids=ids)
    x = first[0] if first else named["hidden_states"]
    weights = {f"{n}_proj.weight": getattr(t5, n).weight for n in "qkvo"}
    weights["inputs.bucket_table.weight"] = table.relative_attention_bias.weight
    causal = str(side == "decoder").lower()
    found = output(f"softmax[distance=buckets,scale=1,causal={causal}]", weights, x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
