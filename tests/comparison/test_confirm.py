"""--confirm on a measure that runs nothing: what each technique is asked to run, and the Markdown table against ratios
worked out by hand."""

import json
from functools import partial
from pathlib import Path

import pytest
from run_figures import figures
from tiny_jobs import save_tiny_model

from batchinfer.cli import main as command_line
from batchinfer.comparison import confirm as confirmation
from batchinfer.comparison.confirm import confirm
from batchinfer.comparison.confirm_table import confirm_table
from batchinfer.config import JobConfig
from batchinfer.errors import UsageError
from batchinfer.options import EffectiveOptions
from batchinfer.pipeline import bench_throughput


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "model", context=512)


class Measure:
    """Says that what a technique brings is twice as fast; keeps what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[JobConfig] = []

    def __call__(self, options, report):
        config = options.config
        self.asked.append(config)
        rows = [json.loads(line) for line in Path(config.input.input[0]).read_text().splitlines()]
        tokens = sum(row["max_tokens"] for row in rows)
        return figures(200.0 if len(self.asked) % 4 in (2, 3) else 100.0, tokens)


def confirmed(model: Path, folder: Path, measure: Measure, quantized: str | None = None, **options):
    base = EffectiveOptions.resolve({"model": str(model), **options}, {"input": (str(folder),)})
    return confirm(base, quantized, 2, folder, lambda line: None, measure)


def test_each_technique_runs_without_and_with_it_alternately(model: Path, tmp_path: Path):
    measure = Measure()
    result = confirmed(model, tmp_path, measure, "other", threads=1)
    asked = [measure.asked[start : start + 4] for start in range(0, len(measure.asked), 4)]
    values = [
        [config.scheduler.batching for config in asked[0]],
        [config.scheduler.kv_allocation for config in asked[1]],
        [config.cache.enable_prefix_caching for config in asked[2]],
        [config.scheduler.order for config in asked[3]],
        [config.cache.kv_cache_dtype for config in asked[4]],
        [config.model.model for config in asked[5]],
    ]
    assert values == [
        [without, applied, applied, without]
        for without, applied in (
            *(("static", "continuous"), ("contiguous", "paged"), (False, True), ("input", "packed"), ("bf16", "fp8")),
            (str(model), "other"),
        )
    ]
    for config in measure.asked:
        assert (config.sampling.temperature, config.sampling.ignore_eos, config.model.threads) == (0.0, True, 1)
    for pair in asked:  # on the same rows, in the same memory
        assert (
            len({(config.input.input, config.cache.kv_cache_memory, config.model.max_model_len) for config in pair})
            == 1
        )
    assert [comparison["same_work"] for comparison in result["comparisons"]] == [True] * 6
    assert [variant["name"] for variant in result["comparisons"][2]["variants"]] == [
        "enable_prefix_caching=off",
        "enable_prefix_caching=on",
    ]
    assert result["comparisons"][0]["settings"].split() == [
        *("--kv-cache-dtype=bf16", f"--kv-cache-memory={8 * 17 * 2 * 2 * 2 * 16 * 2 * 16}"),
        *("--max-num-seqs=8", "--order=input"),
    ]
    assert "--kv-cache-dtype" not in result["comparisons"][4]["settings"]


def test_the_16_bit_kv_is_that_of_the_run(model: Path, tmp_path: Path):
    measure = Measure()
    confirmed(model, tmp_path, measure, dtype="fp16")
    assert {config.cache.kv_cache_dtype for config in measure.asked} == {"fp16", "fp8"}


@pytest.mark.parametrize("option", [{"max_num_seqs": 8}, {"limit": 3}, {"input": ("a.jsonl",)}])
def test_options_that_it_chooses_itself_are_refused(model: Path, tmp_path: Path, option):
    measure = Measure()
    (name,) = option
    flag = "--" + name.replace("_", "-")
    with pytest.raises(UsageError, match=f"^{flag}: --confirm chooses it .* it takes --model, --dtype"):
        confirmed(model, tmp_path, measure, **option)
    assert measure.asked == []


def entry(speed, mean, ttft, tbt, spread=0.0):
    return {
        "output_tokens_per_s": speed,
        "batch_size": {"mean": mean},
        "ttft_ms": {"p50": ttft},
        "tbt_ms": {"p50": tbt},
        "runs": [{"output_tokens_per_s": speed * (1 + spread)}, {"output_tokens_per_s": speed * (1 - spread)}],
    }


def test_the_table():
    confirmed = {
        "model": "a model",
        "rounds": 2,
        "comparisons": [
            {
                "technique": "paged KV",
                "workload": "9 rows",
                "settings": "--order=input",
                "own_figure": {"name": "held", "values": [0, 8], "texts": ["0%", "8%"]},
                "variants": [entry(1000, 4, 2000, 20, 0.034), entry(2250, 9.04, 500, None)],
            }
        ],
    }
    lines = confirm_table(confirmed).split("\n")
    assert lines == [
        "| technique | output tokens/s | at once, mean | TTFT p50 | TBT p50 | its own figure |",
        "|---|---|---|---|---|---|",
        "| paged KV | 1,000 → 2,250 (2.25x) | 4.0 → 9.0 (2.26x) | 2.0 s → 500 ms (0.25x) | 20 ms → - | held: 0% → 8% |",
        "",
        "- paged KV: 9 rows; `--order=input`",
        "",
        "a model; medians of 2 rounds, of which the farthest lies 3% from its median in output tokens/s.",
    ]
    assert confirm_table(confirmed | {"rounds": 1}).endswith("a model; one round.")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--confirm", "--vary", "dtype=bf16,fp32"], "one of the two"),
        (["--vary", "dtype=bf16,fp32", "--markdown", "x.md"], "belong to --confirm"),
        (["--confirm", "--input", "a.jsonl"], "--input: --confirm chooses it"),
    ],
)
def test_usage_mistakes(arguments, words, capsys, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command_line._run(["bench", "compare", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("failing", "written"), [(["f.json"], ["t.md"]), (["t.md"], ["f.json"]), (["f.json", "t.md"], [])]
)
def test_a_file_that_cannot_be_written_leaves_the_other_one(failing, written, tmp_path: Path, capsys, monkeypatch):
    """Both were writable when the command began."""
    monkeypatch.chdir(tmp_path)

    def measured(*_):
        for name in failing:
            (tmp_path / name).mkdir()
        return {"model": "a model", "rounds": 1, "comparisons": []}

    monkeypatch.setattr(confirmation, "confirm", measured)
    arguments = ["--confirm", "--json", "f.json", "--markdown", "t.md"]
    assert command_line._run(["bench", "compare", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out.endswith("a model; one round.\n")
    for name in written:
        assert "a model" in (tmp_path / name).read_text()
    (line,) = (line for line in captured.err.splitlines() if "error: " in line)
    assert [tmp_path.joinpath(name).as_posix() in line for name in ("f.json", "t.md")] == [
        name in failing for name in ("f.json", "t.md")
    ]


@pytest.mark.slow
def test_the_whole_set_on_a_tiny_model(model: Path, tmp_path: Path, capsys, monkeypatch):
    """Every run in this process, as what a process of its own brings is tested on one comparison elsewhere."""
    in_process = partial(confirm, measure=lambda options, report: bench_throughput(options))
    monkeypatch.setattr(confirmation, "confirm", in_process)
    figures_file, table_file = tmp_path / "figures.json", tmp_path / "table.md"
    options = ["--model", model, "--dtype", "fp32", "--threads", 1, "--repeat", 1]
    options += ["--json", figures_file, "--markdown", table_file]
    assert command_line._run(["bench", "compare", "--confirm", *map(str, options)]) == 0
    assert capsys.readouterr().out == table_file.read_text()
    comparisons = json.loads(figures_file.read_text())["comparisons"]
    assert [comparison["same_work"] for comparison in comparisons] == [True] * 5
    batching, allocation, caching, order, kv_dtype = (comparison["variants"] for comparison in comparisons)
    assert batching[0]["steps"] > 2 * batching[1]["steps"]
    assert allocation[0]["batch_size"]["peak"] == 4
    assert allocation[1]["batch_size"]["mean"] > 2 * allocation[0]["batch_size"]["mean"]
    # All but the first row of each of the 8 beginnings find its 400 tokens
    assert (caching[0]["cached_prompt_tokens"], caching[1]["cached_prompt_tokens"]) == (0, 40 * 400)
    assert order[0]["cached_prompt_tokens"] < 0.6 * 40 * 400
    assert order[1]["cached_prompt_tokens"] >= 0.95 * 40 * 400
    assert kv_dtype[1]["kv_blocks"]["total"] == 102  # 64 blocks of 16-bit heads of 16: 32 bytes against 16 + 4
