"""Caches and `generate`, of our model and of models whose attention is replaced."""

import copy
import functools

import pytest

pytest.importorskip("transformers")

import torch
from transformers import DynamicCache

from precondattn.cache import Cache
from precondattn.integrations.transformers import PrecondattnCache, static_cache
from precondattn.integrations.transformers.cache import DraftRecording
from precondattn.integrations.transformers.dynamic_cache import DynamicCacheLayer
from tests.integrations.transformers.small_models import (
    cache_for,
    close,
    greedy,
    logits_at_once,
    logits_in_parts,
    model,
    prompts,
)

KINDS = (
    "lucid",  # A cache of tokens, which can be cropped.
    "path",  # A cache of rows that later tokens rewrite.
    "ccq(gated_delta)",  # Two states.
    "differential(laser)",  # Two calls that share what is cached.
    "softmax[sink=true,window=3]",  # A cache of the last tokens, and a parameter of its own.
)
"""Mechanisms by what the cache of our model holds."""
REPLACED = (
    "softmax",
    "lucid",
    "laser",
    "lucid(laser)",
    "row_normalized",
    "qk_norm",
    "temperature[per=head]",
)
LOCAL = ("Qwen2, a window in one layer", "Mistral", "Gemma3", "GptOss")
HYBRID = "gated_delta + lucid"
FEW = (("own", HYBRID), ("Llama", "lucid(laser)"), ("Mistral", "softmax"))
IDS, MASK = prompts()
ONES = torch.ones_like(MASK)
kinds = pytest.mark.parametrize("kind", ["dynamic", "static"])


@functools.cache
def assistant(family, mechanism):
    """A model that often, but not always, writes the same next token."""
    draft = copy.deepcopy(model(family, mechanism))
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(0.1 * weight.std() * torch.randn_like(weight) if weight.ndim > 1 else 0)
    return draft


@pytest.mark.parametrize(
    ("family", "mechanism"),
    [
        *((family, name) for family in ("Llama", *LOCAL) for name in ("softmax", "lucid")),
        *(("own", mechanism) for mechanism in (*KINDS, HYBRID)),
    ],
)
@torch.no_grad()
def test_a_model_in_parts_gives_what_it_gives_at_once(family, mechanism):
    of, right = model(family, mechanism), ONES.clone()
    right[1, 9:] = 0  # Padding may begin after the cache.
    for mask in (MASK, right):
        expected, valid = logits_at_once(of, IDS, mask), mask.bool()
        for kind in ("dynamic", "static"):
            found = logits_in_parts(of, IDS, mask, (6, 1, 1, 3), cache_for(of, kind))
            close(found[valid], expected[valid])


WAYS = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.7, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 3},
    "assisted": {"do_sample": False},
    "prompt lookup": {"do_sample": False, "prompt_lookup_num_tokens": 3},
}
DRAFTED = ("assisted", "prompt lookup")
LOOKED_UP = torch.cat([IDS[:1], IDS[:1, 2:6]], 1)
"""Words that come again, for prompt lookup to find."""


def written(of, batch, **options):
    """Tokens and logits of a seeded `generate`, for one prompt or a batch with padding."""
    ids, mask = (LOOKED_UP, torch.ones_like(LOOKED_UP)) if batch == 1 else (IDS, MASK)
    torch.manual_seed(2)
    out = of.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=6,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    return out.sequences, torch.stack(out.logits)


@functools.cache
def uncached(family, mechanism, way, batch):
    # The models that check drafts write what they write without them.
    options = WAYS["greedy" if way in DRAFTED else way]
    return written(model(family, mechanism), batch, use_cache=False, **options)


def compare(family, mechanism, kind, way, batch):
    """The same tokens with a cache as without, or Transformers' refusal of drafts for a batch."""
    of, options = model(family, mechanism), dict(WAYS[way])
    if way == "assisted":
        options["assistant_model"] = assistant(family, mechanism)
    if kind == "static" and way in DRAFTED:
        options["past_key_values"] = static_cache(of, 32)
    elif kind == "static":
        options["cache_implementation"] = "static"
    if way in DRAFTED and batch > 1:
        with pytest.raises(ValueError, match="batch_size = 1"):
            written(of, batch, **options)
        return
    tokens, logits = written(of, batch, **options)
    expected_tokens, expected = uncached(family, mechanism, way, batch)
    assert tokens.tolist() == expected_tokens.tolist(), (kind, way, batch)
    close(logits, expected)


@pytest.mark.thorough(but=("softmax-dynamic", "lucid(laser)-static"))
@kinds
@pytest.mark.parametrize("mechanism", REPLACED)
def test_with_a_cache_a_model_writes_what_it_writes_without(mechanism, kind):
    for way in WAYS:
        for batch in (1, 2):
            compare("Llama", mechanism, kind, way, batch)


@pytest.mark.thorough(but=("lucid", HYBRID))
@pytest.mark.parametrize("mechanism", [*KINDS, HYBRID])
def test_with_a_cache_our_model_writes_what_it_writes_without(mechanism):
    for way in ("greedy", "sampled", "beams"):
        for batch in (1, 2):
            compare("own", mechanism, "dynamic", way, batch)
    compare("own", mechanism, "static", "greedy", 2)


@kinds
@pytest.mark.parametrize("family", LOCAL[:2])
def test_a_window_generates_longer_than_it_is(family, kind):
    of = model(family, "softmax")
    found = greedy(of, IDS, MASK, cache_implementation=kind)
    assert torch.equal(found, greedy(of, IDS, MASK, use_cache=False))


@pytest.mark.parametrize(
    ("family", "mechanism"), [("own", HYBRID), ("Llama", "lucid(laser)"), ("Llama", "temperature")]
)
def test_a_left_padded_prompt_writes_what_it_writes_alone(family, mechanism):
    of = model(family, mechanism)
    padded = greedy(of, IDS, MASK)[1:]
    assert torch.equal(padded[:, 4:], greedy(of, IDS[1:, 4:], MASK[1:, 4:]))


@pytest.mark.parametrize(
    ("family", "mechanism"),
    [("own", "lucid"), ("own", "path"), ("Llama", "lucid"), ("Mistral", "softmax")],
)
def test_rejected_drafts_leave_no_trace(family, mechanism, monkeypatch):
    removed, owner = [], PrecondattnCache if family == "own" else DynamicCacheLayer
    crop = owner.crop
    monkeypatch.setattr(owner, "crop", lambda *a: removed.append(a[1]) or crop(*a))
    for way in DRAFTED:
        compare(family, mechanism, "dynamic", way, 1)
    assert min(removed) < 0


@pytest.mark.parametrize("mechanism", ["ccq(gla)", "mlstm"])
def test_drafts_of_a_state_are_rejected_without_a_second_pass(mechanism, monkeypatch):
    cropped, crop = [], Cache.crop
    monkeypatch.setattr(Cache, "crop", lambda *a: cropped.append(a[1]) or crop(*a))
    monkeypatch.setattr(DraftRecording, "before", None)
    compare("own", mechanism, "dynamic", "prompt lookup", 1)
    assert cropped


@pytest.mark.parametrize(
    ("family", "mechanism"),
    [
        *(("Llama", "lucid"), ("Mistral", "softmax"), ("Mistral", "lucid")),
        *(("own", name) for name in ("softmax[window=3]", "ccq(gla)", HYBRID)),
    ],
)
@torch.no_grad()
def test_a_cropped_cache_never_had_the_tokens(family, mechanism):
    of, wrong = model(family, mechanism), torch.cat([IDS[:, :7], IDS.flip(1)[:, 7:]], 1)
    cache = cache_for(of, "dynamic")
    logits_in_parts(of, IDS, MASK, (7,), cache)
    cache.activate_past_recording()
    logits_in_parts(of, wrong, MASK, (3, 1), cache, start=7)
    cache.crop(-4)
    assert cache.get_seq_length() == 7
    found = logits_in_parts(of, torch.cat([IDS[:, :9], wrong[:, 9:]], 1), MASK, (3,), cache, 7)
    cache.crop(-1)
    found = torch.cat([found[:, :2], logits_in_parts(of, IDS, MASK, (2,), cache, 9)], 1)
    close(found, logits_at_once(of, IDS, MASK)[:, 7:])


@torch.no_grad()
def test_what_was_not_recorded_can_not_be_cropped_from_a_window_or_a_state():
    of, cache = model("Mistral", "softmax"), DynamicCache()
    of(IDS, past_key_values=cache)
    with pytest.raises(ValueError, match=r"activate_past_recording\(\)"):
        cache.crop(-2)
    cache = DynamicCache()
    model("Llama")(IDS, past_key_values=cache)
    with pytest.raises(ValueError, match="minus the number of tokens to remove"):
        cache.crop(3)
    own = model("own", HYBRID)
    cache = own(IDS).past_key_values
    with pytest.raises(ValueError, match=r"layer 0 has the buffers .*can not be cropped; call"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="between -11 and 0; found -12"):
        cache.crop(-12)
    cache.activate_past_recording()
    own(IDS[:, :2], past_key_values=cache)
    with pytest.raises(ValueError, match="can not be cropped"):
        cache.crop(-3)
    assert cache.get_seq_length() == 13
    cache.crop(-2)
    with pytest.raises(ValueError, match="can not be cropped"):
        cache.crop(-1)


@kinds
@pytest.mark.parametrize(("family", "mechanism"), FEW)
def test_two_calls_of_generate_continue_one_cache_which_may_be_filled_in_chunks(
    family, mechanism, kind
):
    of = model(family, mechanism)
    cache = cache_for(of, kind, 40)
    first = greedy(of, IDS, MASK, past_key_values=cache, prefill_chunk_size=3)
    assert torch.equal(first, greedy(of, IDS, MASK, use_cache=False))
    before, more = copy.deepcopy(cache), torch.cat([first, IDS[:, -3:]], 1)
    longer = torch.cat([MASK, MASK.new_ones(2, more.shape[1] - MASK.shape[1])], 1)
    second = greedy(of, more, longer, past_key_values=cache)
    assert int(before.get_seq_length()) == first.shape[1] - 1
    assert int(cache.get_seq_length()) == second.shape[1] - 1
    assert torch.equal(second, greedy(of, more, longer, use_cache=False))


@kinds
@pytest.mark.parametrize("family", ["own", "Llama"])
@torch.no_grad()
def test_sequences_are_repeated_selected_reordered_and_forgotten(family, kind):
    of = model(family)
    cache = cache_for(of, kind)
    logits_in_parts(of, IDS, MASK, (8,), cache)
    cache.batch_repeat_interleave(2)
    kept = torch.tensor([True, False, True, True])
    cache.batch_select_indices(kept.nonzero()[:, 0] if family == "own" else kept)
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    rows, expected = torch.tensor([1, 0, 1]), logits_at_once(of, IDS, MASK)
    close(logits_in_parts(of, IDS[rows], MASK[rows], (3,), cache, 8), expected[rows, 8:])
    cache = cache_for(of, kind)
    for _ in range(2):
        close(logits_in_parts(of, IDS, MASK, (6, 5), cache)[MASK > 0], expected[MASK > 0])
        cache.reset()


@pytest.mark.parametrize(
    ("family", "message"),
    [("own", "at most 16 tokens"), ("Llama", "is for 16 tokens; found 1 new ones after 16")],
)
@torch.no_grad()
def test_a_cache_grows_and_a_static_one_is_full(family, message):
    of, ids = model(family), IDS.repeat(1, 8)
    mask, fixed = torch.ones_like(ids), cache_for(of, "static")
    found = logits_in_parts(of, ids, mask, (60, 1, 1, 1, 1, 1, 23), cache_for(of, "dynamic"))
    close(found, logits_at_once(of, ids, mask))
    of(ids[:, :16], past_key_values=fixed)
    with pytest.raises(ValueError, match=message):
        of(ids[:, 16:17], past_key_values=fixed)


@torch.no_grad()
def test_a_window_of_softmax_keeps_a_few_rows_and_lucid_all():
    ids = IDS[:1].repeat(1, 10)
    for mechanism, rows in (("softmax", 6), ("lucid", 165)):
        cache = DynamicCache()
        model("Mistral", mechanism)(ids, past_key_values=cache)
        assert cache.layers[0].cache.store["k"].shape[1] == rows
