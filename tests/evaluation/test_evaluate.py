"""`batchinfer evaluate` on tiny models against Hugging Face in float32, and what it refuses."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hugging_face import HuggingFaceOracle
from safetensors.torch import load_file, save_file
from small_tokenizers import ids_of
from tiny_jobs import save_tiny_model, write_jsonl, write_parquet

from batchinfer.cli import main as command_line
from batchinfer.evaluation import evaluate

LENGTHS = (15, 16, 17, 40, 512, 513, 700, 1025)
FIGURES = {"kl_divergence", "kl_divergence_p99", "kl_divergence_max", "top1_agreement", "against_perplexity"}


def text(length, seed):
    return "".join(map(chr, np.random.default_rng(seed).integers(97, 123, length)))


TEXTS = [text(length, seed) for seed, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model, and the same with noise on its weights."""
    model = save_tiny_model(tmp_path_factory.mktemp("models") / "a", context=1200)
    other = save_tiny_model(model.parent / "b", context=1200)
    noise = torch.Generator().manual_seed(1)
    weights = load_file(other / "model.safetensors")
    weights = {name: w + 0.03 * torch.randn(w.shape, generator=noise) for name, w in weights.items()}
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    return model, other


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_parquet(tmp_path_factory.mktemp("texts") / "t.parquet", [{"text": text} for text in TEXTS])


def call(*options):
    return command_line._run(["evaluate", *map(str, options), "--threads", "1"])


def figures(tmp_path, *options):
    file = tmp_path / "figures.json"
    assert call(*options, "--json", file) == 0
    return json.loads(file.read_text())


def windows():
    """(inputs, targets) worked out from the rule: 512 targets, 16 inputs at least."""
    for ids in map(ids_of, TEXTS):
        targets = ids[1:]
        for start in range(0, len(targets), 512):
            part = targets[start : start + 512]
            if len(part) >= 16:
                yield ids[start : start + len(part)], part


@torch.no_grad()
def log_probabilities(oracle):
    """float64 [targets, vocabulary] over all windows, and the targets."""
    logits = [oracle.model(torch.tensor([inputs])).logits[0] for inputs, _ in windows()]
    targets = [target for _, part in windows() for target in part]
    return torch.cat(logits).double().log_softmax(-1).numpy(), np.array(targets)


def test_figures_equal_those_of_hugging_face(models, texts, tmp_path, capsys):
    oracles = [HuggingFaceOracle(model) for model in models]
    (q, targets), (p, _) = map(log_probabilities, oracles)
    rows = np.arange(len(targets))
    kl = (np.exp(p) * (p - q)).sum(axis=1)
    options = ["--model", models[0], "--against", models[1], "--text", texts, "--max-num-batched-tokens", 700]
    found = figures(tmp_path, *options, "--greedy-prompts", 3, "--greedy-tokens", 12)
    assert (found["texts"], found["windows"], found["tokens"]) == (8, 8, 16 + 39 + 511 + 512 + 512 + 187 + 2 * 512)
    assert found["tokens"] == len(targets)
    assert found["perplexity"] == pytest.approx(math.exp(-q[rows, targets].mean()), rel=1e-4)
    assert found["against_perplexity"] == pytest.approx(math.exp(-p[rows, targets].mean()), rel=1e-4)
    assert found["kl_divergence"] == pytest.approx(kl.mean(), rel=1e-4)
    assert found["kl_divergence_p99"] == pytest.approx(np.percentile(kl, 99), rel=1e-4)
    assert found["kl_divergence_max"] == pytest.approx(kl.max(), rel=1e-4)
    assert found["top1_agreement"] == (q.argmax(axis=1) == p.argmax(axis=1)).mean()
    chosen = [list(windows())[number][0][:64] for number in (0, 2, 5)]  # of 8 windows
    prompts = [inputs[:64] for inputs in chosen]
    counts = []
    for prompt in prompts:
        one, other = (oracle.generate(prompt, 12) for oracle in oracles)
        counts.append([*(a == b for a, b in zip(one, other, strict=True)), False].index(False))
    assert found["greedy_agreement_tokens"] == pytest.approx(sum(counts) / 3)
    table = capsys.readouterr().out
    assert f"{found['perplexity']:.4f}" in table
    assert f"{found['kl_divergence']:.6f} nats in the mean" in table
    assert f"{found['top1_agreement']:.2%} of the tokens agree" in table


def test_passes_of_any_size_give_the_same(models, texts, tmp_path):
    few, many = (
        figures(tmp_path, "--model", models[0], "--text", texts, "--max-num-batched-tokens", size)
        for size in (1, 100_000)
    )
    assert few["perplexity"] == pytest.approx(many["perplexity"], rel=1e-6)
    assert not FIGURES & few.keys()


def test_a_cache_of_8_bits_differs_and_with_all_layers_skipped_it_does_not(models, texts, tmp_path):
    options = ["--model", models[0], "--against", models[0], "--text", texts, "--kv-cache-dtype", "fp8_e5m2"]
    narrow = figures(tmp_path, *options, "--greedy-prompts", 0)
    assert narrow["kl_divergence"] > 1e-3
    assert narrow["kv_cache_dtype"] == "fp8_e5m2"
    assert narrow["against"]["kv_cache_dtype"] == "fp32"
    assert "greedy_agreement_tokens" not in narrow
    wide = figures(tmp_path, *options, "--kv-cache-dtype-skip-layers", "0-1", "--greedy-tokens", 5)
    assert (wide["kl_divergence"], wide["top1_agreement"], wide["greedy_agreement_tokens"]) == (0, 1, 5)
    one = figures(tmp_path, *options, "--kv-cache-dtype-skip-layers", "1", "--greedy-prompts", 0)
    assert 0 < one["kl_divergence"] < narrow["kl_divergence"]
    same = figures(tmp_path, *options, "--against-kv-cache-dtype", "fp8_e5m2", "--greedy-prompts", 0)
    assert same["kl_divergence"] == 0


def test_other_formats_and_a_limit(models, tmp_path):
    rows = write_jsonl(tmp_path / "t.jsonl", [{"body": text} for text in TEXTS])
    plain = tmp_path / "t.txt"
    plain.write_text(TEXTS[3])
    limited = figures(tmp_path, "--model", models[0], "--text", rows, "--text-column", "body", "--limit", 4)
    assert limited["tokens"] == 16 + 39
    whole = figures(tmp_path, "--model", models[0], "--text", plain, "--text", plain, "--window", 20)
    assert (whole["texts"], whole["windows"], whole["tokens"]) == (2, 4, 2 * 39)


def test_a_limit_ends_the_reading(models, tmp_path, monkeypatch):
    def endless(option, path, column):
        while True:
            yield TEXTS[3]

    monkeypatch.setattr(evaluate, "iter_texts", endless)
    assert figures(tmp_path, "--model", models[0], "--text", "any.txt", "--limit", 3)["texts"] == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--text-column", "body"], "there is no column 'body'; it has text"),
        (["--against-dtype", "bf16"], "--against-dtype: there is nothing to hold against; name a model with --against"),
        (["--window", 1201], "--window 1201: the model has positions for 1200 tokens"),
        (["--window", 0], "window = 0: must be 1 or more"),
        (["--window", 1100, "--min-inputs", 1100], "the longest text has 1025 tokens, fewer than the 1101"),
        (["--kv-cache-dtype-skip-layers", "0"], "kv_cache_dtype_skip_layers = '0': must be absent where"),
        (["--kv-cache-dtype", "fp8", "--kv-cache-dtype-skip-layers", "2"], "the model has layers 0 to 1"),
    ],
)
def test_refusals_are_one_line(models, texts, options, message, capsys):
    assert call("--model", models[0], "--text", texts, *options) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("batchinfer: error: ")
    assert message in last


def test_greedy_answers_without_positions_are_refused_before_anything_is_scored(models, texts, capsys):
    """The model has 1,200 positions, and prompts are of 64 tokens."""
    assert call("--model", models[0], "--text", texts, "--against", models[1], "--greedy-tokens", 1137) == 2
    lines = capsys.readouterr().err
    assert "--greedy-tokens 1137: with prompts of 64 tokens the model has positions for 1136" in lines
    assert "scoring" not in lines


def test_another_tokenizer_is_refused(models, texts, tmp_path, capsys):
    other = save_tiny_model(tmp_path / "c")
    file = other / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(content))
    assert call("--model", models[0], "--text", texts, "--against", other) == 2
    assert "its tokenizer cuts the texts otherwise" in capsys.readouterr().err


def test_numbers_that_are_not_finite_end_it(models, texts, tmp_path, capsys):
    broken = save_tiny_model(tmp_path / "c", context=1200)
    weights = load_file(broken / "model.safetensors")
    weights["lm_head.weight"][7] = torch.inf
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    assert call("--model", models[0], "--text", texts, "--against", broken) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"batchinfer: error: --against {broken}: the model's numbers became NaN or infinite")


EVALUATION_TEXT = Path(__file__).resolve().parents[3] / "shared" / "bench" / "evaluation_text.parquet"
TRANSFORMERS_BF16 = 34.96


slow = pytest.mark.slow
with_text = pytest.mark.skipif(not EVALUATION_TEXT.exists(), reason="needs the workload evaluation_text.parquet")


def of_default_model(smollm2, tmp_path, *options):
    file = tmp_path / "figures.json"
    options = ["--model", smollm2, "--text", EVALUATION_TEXT, *options, "--json", file]
    assert command_line._run(["evaluate", *map(str, options)]) == 0
    return json.loads(file.read_text())


@slow
@with_text
def test_the_default_model(smollm2, tmp_path):
    assert of_default_model(smollm2, tmp_path)["perplexity"] == pytest.approx(TRANSFORMERS_BF16, rel=0.002)


@slow
@with_text
def test_what_fp8_kv_costs_the_default_model(smollm2, tmp_path):
    options = ["--limit", 16, "--against", smollm2, "--against-kv-cache-dtype", "fp8", "--greedy-prompts", 0]
    found = of_default_model(smollm2, tmp_path, *options)
    assert found["tokens"] > 8000
    assert found["against_perplexity"] == pytest.approx(found["perplexity"], rel=0.005)
    assert 0 < found["kl_divergence"] < 0.005
    assert found["top1_agreement"] > 0.95
