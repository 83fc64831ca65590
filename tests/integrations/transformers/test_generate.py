"""`generate` with a cache writes what it writes without, in every way that Transformers has."""

import functools
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import torch

from precondattn.integrations.transformers import replace_attention, static_cache
from tests.integrations.transformers.small_models import model_of, prompts

MECHANISMS = (
    "softmax",
    "lucid",
    "laser",
    "lucid(laser)",
    "row_normalized",
    "qk_norm",
    "temperature[per=head]",
)
WAYS = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.7, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 3},
    "assisted": {"do_sample": False},
    "prompt lookup": {"do_sample": False, "prompt_lookup_num_tokens": 3},
}
DRAFTED = ("assisted", "prompt lookup")
CACHES = ("dynamic", "static")
NEW = 6
PAGE = Path(__file__).parents[3] / "docs" / "transformers.md"


@functools.cache
def replaced(mechanism):
    return replace_attention(model_of(dtype=torch.float64), mechanism)


@functools.cache
def assistant(mechanism):
    """A model that often, but not always, writes the same next token."""
    model = replace_attention(model_of(dtype=torch.float64), mechanism)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * weight.std() * torch.randn_like(weight) if weight.ndim > 1 else 0)
    return model


def inputs(batch):
    """One prompt, or two with padding at the left of one."""
    ids, mask = prompts()
    if batch == 1:
        # Words that come again, for prompt lookup to find.
        return torch.cat([ids[:1], ids[:1, 2:6]], 1), torch.ones(1, 15, dtype=torch.long)
    return ids, mask


def written(model, batch, **options):
    """Tokens and logits of a seeded `generate`."""
    ids, mask = inputs(batch)
    torch.manual_seed(2)
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=NEW,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    return out.sequences, torch.stack(out.logits)


@functools.cache
def uncached(mechanism, way, batch):
    # The models that check drafts write what they write without them.
    options = WAYS["greedy" if way in DRAFTED else way]
    return written(replaced(mechanism), batch, use_cache=False, **options)


@functools.cache
def outcome(mechanism, cache, way, batch):
    """`"equal"`, or who refuses it."""
    model, options = replaced(mechanism), dict(WAYS[way])
    if way == "assisted":
        options["assistant_model"] = assistant(mechanism)
    if cache == "static" and way in DRAFTED:
        options["past_key_values"] = static_cache(model, 32)
    elif cache == "static":
        options["cache_implementation"] = "static"
    if way in DRAFTED and batch > 1:
        with pytest.raises(ValueError, match="batch_size = 1"):
            written(model, batch, **options)
        return "—"
    tokens, logits = written(model, batch, **options)
    expected_tokens, expected = uncached(mechanism, way, batch)
    assert tokens.tolist() == expected_tokens.tolist()
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-9)
    return "equal"


@pytest.mark.parametrize("batch", [1, 2], ids=["one prompt", "left-padded batch"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_with_a_cache_a_model_writes_what_it_writes_without(mechanism, cache, way, batch):
    outcome(mechanism, cache, way, batch)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_left_padded_prompt_writes_what_it_writes_alone(mechanism):
    model, (ids, mask) = replaced(mechanism), prompts()
    options = {"max_new_tokens": NEW, "do_sample": False}
    padded = model.generate(ids, attention_mask=mask, **options)[1:]
    alone = model.generate(ids[1:, 4:], attention_mask=mask[1:, 4:], **options)
    assert torch.equal(padded[:, 4:], alone)


def test_the_page_has_the_table_of_these_outcomes():
    lines = [
        f"| one prompt / left-padded batch | {' | '.join(WAYS)} |",
        f"|---|{'---|' * len(WAYS)}",
    ]
    for mechanism in MECHANISMS:
        for cache in CACHES:
            cells = (
                " / ".join(outcome(mechanism, cache, way, batch) for batch in (1, 2))
                for way in WAYS
            )
            lines.append(f"| `{mechanism}`, {cache} | {' | '.join(cells)} |")
    table = "\n".join(lines)
    assert table in PAGE.read_text(encoding="utf-8"), f"the page needs this table:\n{table}"
