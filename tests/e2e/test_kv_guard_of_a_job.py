"""`--kv-guard` over whole jobs: what is said, stored and kept, and that bench asks for it first."""

import json

import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file, save_file
from tiny_jobs import call, read_rows, save_tiny_model, write_jsonl

from batchinfer.cli import main as command_line
from batchinfer.engine.engine import Engine
from batchinfer.executors import kv_guard

ROWS = [{"prompt": "abcdefgh"[: n + 1] * 3, "max_tokens": 6} for n in range(8)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Small weights, as trained ones are: 8 bits hold its keys and values."""
    model = save_tiny_model(tmp_path_factory.mktemp("small") / "m")
    weights = load_file(model / "model.safetensors")
    weights |= {name: 0.3 * weight for name, weight in weights.items() if "proj" in name}
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    return model


@pytest.fixture
def no_tolerance(monkeypatch):
    """A bound that nothing but all layers in 16 bits keeps."""
    monkeypatch.setattr(kv_guard, "KL_BOUND", 1e-12)


@pytest.fixture
def job(tmp_path):
    rows = write_jsonl(tmp_path / "in.jsonl", ROWS)
    return ["--input", rows, "--output", tmp_path / "out", "--temperature", 0, "--kv-cache-dtype", "fp8"]


def guard_lines(capsys):
    return [line for line in capsys.readouterr().err.splitlines() if "KV guard: " in line]


def stored(tmp_path):
    """The outcome in _stats.json, in the manifest and in a part's metadata."""
    output = tmp_path / "out"
    stats = json.loads((output / "_stats.json").read_text())
    manifest = json.loads((output / "_manifest.json").read_text())
    (part,) = output.glob("part-*.parquet")
    metadata = json.loads(pq.read_schema(part).metadata[b"batchinfer.kv_guard"])
    assert stats["kv_guard"] == manifest["kept"]["kv_guard"] == metadata
    return stats


def test_a_model_that_bears_it_is_compared_on_four_rows_and_runs(model, job, tmp_path, capsys):
    assert call(model, *job) == 0
    (line,) = guard_lines(capsys)
    assert line.startswith("batchinfer: KV guard: fp8 against fp32 KV on ")
    stats = stored(tmp_path)
    # BOS and three times one to four bytes
    assert (stats["kv_guard"]["rows"], stats["kv_guard"]["tokens"]) == (4, 4 + 3 * (1 + 2 + 3 + 4))
    assert stats["kv_guard"]["wide_layers"] == []
    assert stats["wall_seconds"]["KV guard"] > 0
    assert stats["busy_seconds"] == stats["wall_seconds"]["inference"]
    assert stats["prompt_tokens"] == sum(1 + len(row["prompt"]) for row in ROWS)


@pytest.mark.usefixtures("no_tolerance")
def test_a_model_that_does_not_is_warned_of(model, job, tmp_path, capsys):
    assert call(model, *job, "--kv-guard", 2) == 0
    (line,) = guard_lines(capsys)
    assert line.startswith("batchinfer: warning: KV guard: fp8 against fp32 KV on 11 tokens of 2 rows: ")
    guard = stored(tmp_path)["kv_guard"]
    assert guard["wide_layers"] == []
    assert guard["after"]["kl_divergence"] == guard["before"]["kl_divergence"] > guard["kl_bound"] == 1e-12


@pytest.mark.usefixtures("no_tolerance")
def test_strict_runs_with_the_layers_that_it_names_in_the_wider_format(model, job, tmp_path, capsys):
    assert call(model, *job, "--kv-guard", "strict", "--output-token-ids") == 0
    assert "with layers 0, 1 in fp32: KL divergence 0 nats in the mean" in guard_lines(capsys)[-1]
    stats = stored(tmp_path)
    assert stats["kv_guard"]["wide_layers"] == [0, 1]
    # 2 layers of 2 x 2 KV heads of 16 floats, whatever 8 bits would take
    assert stats["kv_cache_bytes"] == stats["kv_blocks"]["total"] * 16 * 2 * 2 * 2 * 16 * 4
    answers = []
    for name, options in (("wide", ["--kv-cache-dtype", "auto"]), ("skip", ["--kv-cache-dtype-skip-layers", "0-1"])):
        output = tmp_path / name
        assert call(model, *job, "--output", output, "--kv-guard", 0, "--output-token-ids", *options) == 0
        answers.append([row["completion_token_ids"] for row in read_rows(output)])
    assert guard_lines(capsys) == []
    assert answers == 2 * [[row["completion_token_ids"] for row in read_rows(tmp_path / "out")]]


@pytest.mark.usefixtures("no_tolerance")
def test_a_job_that_carries_on_keeps_the_outcome(model, job, tmp_path, capsys, monkeypatch):
    options = [*job, "--kv-guard", "strict", "--max-num-seqs", 2]
    step = Engine.step

    def fail_late(self):
        results = step(self)
        if self.stats.steps == 16:
            raise MemoryError
        return results

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", fail_late)
        with pytest.raises(MemoryError):
            call(model, *options)
    capsys.readouterr()
    assert call(model, *job, "--kv-guard", 3) == 2
    assert "--kv-guard was strict, now warn" in capsys.readouterr().err
    with monkeypatch.context() as patch:  # it is not asked again
        patch.setattr("batchinfer.pipeline.guard_kv_cache", None)
        assert call(model, *options, "--kv-guard", "strict:1") == 0
    lines = capsys.readouterr().err
    assert "carrying on" in lines
    assert "of fp8 (2 of 2 layers fp32) holds" in lines
    assert stored(tmp_path)["kv_guard"]["wide_layers"] == [0, 1]


def test_without_8_bits_or_rows_there_is_none(model, job, tmp_path, capsys):
    assert call(model, *job, "--kv-cache-dtype", "auto") == 0
    assert call(model, *job, "--output", tmp_path / "other", "--kv-guard", 0) == 0
    assert guard_lines(capsys) == []
    stats = json.loads((tmp_path / "other" / "_stats.json").read_text())
    assert "kv_guard" not in stats
    assert "KV guard" not in stats["wall_seconds"]


@pytest.mark.parametrize(("options", "asked"), [([], False), (["--kv-guard", "2"], True)])
def test_bench_compares_only_where_it_is_asked_to(model, job, tmp_path, capsys, options, asked):
    figures = tmp_path / "figures.json"
    bench = ["bench", "throughput", "--model", model, "--json", figures, *job[:2], *job[4:], *options]
    assert command_line._run(list(map(str, [*bench, "--threads", 1, "--dtype", "fp32"]))) == 0
    assert bool(guard_lines(capsys)) == asked
    found = json.loads(figures.read_text())
    assert ("kv_guard" in found) == asked
    assert found["options"]["kv_guard"] == (
        {"value": "2", "source": "flag"} if asked else {"value": "0", "source": "bench"}
    )
