"""Models of flash-linear-attention on a CPU, and the outputs of its kernels in the interpreter."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("fla.models")

import torch

from precondattn.integrations.transformers import restore_backend_for, use_backend_for
from tests.integrations.transformers import small_fla_models
from tests.integrations.transformers.small_fla_models import MODELS, SIZES, logits_of, made, prompts


def close(found, expected):
    """Equal to 1e-5 of the largest entry."""
    scale = expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * scale)


@pytest.fixture(scope="module")
def logits_of_kernels(tmp_path_factory):
    """The logits of the models with their own kernels, in a process with Triton's interpreter."""
    path = tmp_path_factory.mktemp("kernels") / "logits.pt"
    script = Path(small_fla_models.__file__)
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, script, path], check=True, env=environment)
    return torch.load(path)


@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_those_of_its_kernels(name, logits_of_kernels):
    model = use_backend_for(made(name))
    ids, mask = prompts()
    close(logits_of(model)[mask.bool()], logits_of_kernels[name][mask.bool()])
    alone = model(ids[:1, 4:], use_cache=False).logits
    close(logits_of(model)[:1, 4:], alone)


@pytest.mark.parametrize("name", MODELS)
def test_cached_is_uncached(name):
    model, (ids, mask) = use_backend_for(made(name)), prompts()
    with torch.no_grad():
        first = model(ids[:, :20], attention_mask=mask[:, :20], use_cache=True)
        last = model(
            ids[:, 20:], attention_mask=mask, past_key_values=first.past_key_values, use_cache=True
        )
    close(last.logits[:, -1], logits_of(model)[:, -1])
    cached, uncached = (
        model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False, use_cache=each)
        for each in (True, False)
    )
    assert cached.tolist() == uncached.tolist()


@pytest.mark.parametrize("name", MODELS)
def test_every_weight_is_trained(name):
    model, (ids, mask) = use_backend_for(made(name)).train(), prompts()
    model(ids, attention_mask=mask, labels=ids, use_cache=False).loss.backward()
    without = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []


def test_a_model_gets_its_own_modules_back():
    model = made("GLA")
    classes = [type(module) for module in model.modules()]
    changed = use_backend_for(copy.deepcopy(model))
    expected = logits_of(changed)
    assert torch.equal(logits_of(copy.deepcopy(changed)), expected)
    restore_backend_for(changed)
    assert [type(module) for module in changed.modules()] == classes
    assert changed.criterion is None


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Mamba2", "Mamba2 of flash-linear-attention is not supported, because it does more"),
        ("HGRN", "HGRNAttention of flash-linear-attention is not supported, .* calls chunk_hgrn"),
        ("GatedDeltaProduct", "calls chunk_gated_delta_product"),
        ("CAT", "has no layer of flash-linear-attention that calls one of chunk_gla"),
    ],
)
def test_other_models_are_refused_with_the_reason(name, reason):
    import fla.models

    with torch.device("meta"):
        config = getattr(fla.models, f"{name}Config")(num_hidden_layers=SIZES["num_hidden_layers"])
        model = getattr(fla.models, f"{name}ForCausalLM")(config)
    with pytest.raises(ValueError, match=reason):
        use_backend_for(model)
