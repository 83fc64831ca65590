"""lm-evaluation-harness takes `PrecondattnForCausalLM` as its model `hf`, without a network."""

import json
import math

import pytest

pytest.importorskip("transformers")
pytest.importorskip("lm_eval")

import torch

from precondattn.integrations.transformers import PrecondattnConfig, PrecondattnForCausalLM

WORDS = ["<pad>", "<end>", "the", "sun", "is", "hot", "cold", "snow", "and", "not"]
LINES = [
    {"text": "the sun is", "choices": [" hot", " cold"], "label": 0},
    {"text": "the snow is", "choices": [" hot", " not cold and cold"], "label": 1},
]
TASK = """
task: tiny
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


def tokenizer():
    """A tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>")
    tokens = Tokenizer(words)
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="<pad>", eos_token="<end>", bos_token="<end>"
    )


@pytest.mark.filterwarnings("ignore")
def test_a_task_is_answered_with_the_log_likelihoods_of_the_model(tmp_path, monkeypatch):
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    import lm_eval
    from lm_eval.tasks import TaskManager

    torch.manual_seed(0)
    model = PrecondattnForCausalLM(
        PrecondattnConfig(
            vocab_size=len(WORDS),
            hidden_size=16,
            num_attention_heads=2,
            layer_types=["gla", "lucid"],
            initializer_range=1.0,
        )
    ).eval()
    model.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    file = tmp_path / "tiny.json"
    file.write_text("\n".join(json.dumps(line) for line in LINES))
    (tmp_path / "tiny.yaml").write_text(TASK.format(file=file))
    results = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(tmp_path / "model"), "device": "cpu", "dtype": "float32"},
        tasks=["tiny"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        batch_size=2,
        bootstrap_iters=0,
        log_samples=True,
    )
    samples = sorted(results["samples"]["tiny"], key=lambda sample: sample["doc_id"])
    for sample, line in zip(samples, LINES, strict=True):
        found = [response[0] for response in sample["filtered_resps"]]
        expected = [_log_likelihood(model, line["text"], choice) for choice in line["choices"]]
        assert all(
            math.isclose(a, b, abs_tol=1e-4)
            for a, b in zip(map(float, found), expected, strict=True)
        )


@torch.no_grad()
def _log_likelihood(model, text, choice):
    ids = [WORDS.index(word) for word in (text + choice).split()]
    start = len(text.split())
    log_p = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return sum(log_p[i - 1, ids[i]].item() for i in range(start, len(ids)))
