"""The command line from outside: help, options, errors and exit codes. The pipeline is replaced by a recorder."""

import json
import sys
import types

import pytest

from batchinfer.cli import main as cli
from batchinfer.config import JobConfig, iter_options
from batchinfer.errors import BatchInferError, ExitCode, UsageError

STATS = {
    "rows": 3,
    "completions": 3,
    "rows_resumed": 0,
    "finish_reasons": {"stop": 1, "length": 2, "error": 0},
    "errors_by_code": {},
    "prompt_tokens": 60,
    "cached_prompt_tokens": 0,
    "completion_tokens": 30,
    "preemptions": 0,
    "output_tokens_per_s": 345.6,
    "total_tokens_per_s": 1036.8,
    "wall_seconds": {"startup": 1.0},
    "batch_size": {"mean": 2.0, "peak": 3},
    "kv_blocks": {"total": 10, "peak": 5, "mean": 2.5},
    "kv_cache_bytes": 1024,
    "peak_memory_bytes": 4096,
    **{name: {"mean": 1.0, "p50": 1.0, "p90": 2.0, "p99": 3.0, "max": 4.0} for name in ("ttft_ms", "tbt_ms")},
    "latency_ms": {"mean": 1.0, "p50": 1.0, "p90": 2.0, "p99": 3.0, "max": 4.0},
}


@pytest.fixture
def pipeline(monkeypatch):
    """Stands in for batchinfer.pipeline; keeps the options it is given, and raises or returns `outcome`."""
    module = types.ModuleType("batchinfer.pipeline")
    module.calls = []
    module.outcome = ExitCode.DONE

    def answer(options, *more):
        module.calls.append(options)
        module.more = more
        if isinstance(module.outcome, BaseException):
            raise module.outcome
        return module.outcome

    module.run_job = answer
    module.bench_throughput = answer
    monkeypatch.setitem(sys.modules, "batchinfer.pipeline", module)
    return module


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    return int(left.value.code)


def test_version(capsys):
    assert call("--version") == 0
    assert capsys.readouterr().out == "batchinfer, version 0.1.0\n"


def test_help_of_run_holds_every_option_within_100_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert call("run", "--help") == 0
    text = capsys.readouterr().out
    words = set(text.replace("/", " ").split())
    for _, member in iter_options():
        assert "--" + member.name.replace("_", "-") in words, member.name
    assert {"--job", "--set", "--no-enable-prefix-caching"} <= words
    assert max(map(len, text.splitlines())) <= 100


def test_help_of_run_is_grouped_in_the_order_of_the_configuration(capsys):
    call("run", "--help")
    text = capsys.readouterr().out
    titles = [f"\n{name.capitalize()}: " for name in JobConfig.__dataclass_fields__]
    places = [text.index(title) for title in [*titles, "\nJob file: "]]
    assert places == sorted(places)
    assert places[3] < text.index("--kv-cache-dtype") < places[4]


def test_help_shows_defaults(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    call("run", "--help")
    flowing = " ".join(capsys.readouterr().out.split())
    assert "--block-size N Tokens in a KV block. [default: 16]" in flowing
    assert "Compute equal beginnings of prompts once. [default: on]" in flowing


@pytest.mark.parametrize("command", [["bench"], []])
def test_a_group_without_a_command_shows_its_help(command, capsys):
    assert call(*command) in (ExitCode.DONE, ExitCode.USAGE)  # it depends on click's version
    captured = capsys.readouterr()
    assert "Commands:" in captured.out + captured.err


def test_flags_reach_the_pipeline_with_their_types(pipeline):
    code = call(
        "run",
        *("--input", "a.parquet", "--input", "b.jsonl"),
        *("--kv-cache-memory", "24MiB", "--deadline", "90m", "--no-enable-prefix-caching"),
        *("--stop", "x", "--stop", "y", "--stop-token-ids", "7", "--temperature", "0", "--dtype", "fp32"),
        *("--logit-bias", '{"42": -1}'),
    )
    assert code == 0
    (options,) = pipeline.calls
    assert options["input"] == (("a.parquet", "b.jsonl"), "flag")
    assert options.config.cache.kv_cache_memory == 24 * 2**20
    assert options.config.limits.deadline == 5400.0
    assert options.config.cache.enable_prefix_caching is False
    assert options.config.sampling.stop == ("x", "y")
    assert options.config.sampling.stop_token_ids == (7,)
    assert options["temperature"] == (0.0, "flag")
    assert options["top_p"] == (None, "default")
    assert options["ignore_eos"] == (None, "default")
    assert options["stop"].source == "flag"


def test_a_flag_given_at_its_default_still_counts_as_given(pipeline):
    call("run", "--input", "a", "--block-size", "16", "--enable-prefix-caching")
    assert pipeline.calls[0]["block_size"] == (16, "flag")
    assert pipeline.calls[0]["enable_prefix_caching"] == (True, "flag")


def test_flag_beats_job_file(pipeline, tmp_path):
    job = tmp_path / "job.toml"
    job.write_text('input = "{day}.parquet"\nmax-num-seqs = 8\nseed = 3\n')
    assert call("run", "--job", str(job), "--set", "day=monday", "--seed", "4") == 0
    (options,) = pipeline.calls
    assert options["input"] == (("monday.parquet",), "job file")
    assert options["max_num_seqs"] == (8, "job file")
    assert options["seed"] == (4, "flag")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], "no input: give --input PATH"),
        (["run", "--kv-cache-memry", "1"], "No such option"),
        (["run", "--input", "a", "--kv-cache-memory", "3x"], "'3x' is not a size"),
        (["run", "--input", "a", "--deadline", "soon"], "'soon' is not a duration"),
        (["run", "--input", "a", "--dtype", "fp8"], "'bf16'"),
        (["run", "--input", "a", "--max-tokens", "x"], "--max-tokens"),
        (["run", "--input", "a", "--top-p", "7"], "top_p = 7.0: must be above 0 and at most 1"),
        (["run", "--input", "a", "--limit", "1", "--sample", "1"], "sample = 1: must be absent"),
        (["run", "--input", "a", "--set", "k=v"], "give --job FILE"),
        (["run", "--job", "absent.toml"], "absent.toml: No such file"),
        (["run", "stray"], "unexpected extra argument"),
        (["bench", "throughput"], "no input"),
        (["nonsense"], "No such command"),
    ],
)
def test_usage_mistakes_exit_2_with_one_reason(pipeline, capsys, arguments, message):
    assert call(*arguments) == ExitCode.USAGE
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("batchinfer: error: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert pipeline.calls == []


@pytest.mark.parametrize(
    ("outcome", "code", "message"),
    [
        (ExitCode.TOO_MANY_ERRORS, 3, ""),
        (ExitCode.INTERRUPTED, 75, ""),
        (BatchInferError("7 of 9 are torn;\n see there"), 1, "batchinfer: error: 7 of 9 are torn; see there\n"),
        (UsageError("not so"), 2, "batchinfer: error: not so\n"),
        (OSError(28, "No space left on device", "/x/part"), 1, "batchinfer: error: /x/part: No space left on device\n"),
        (PermissionError("no"), 1, "batchinfer: error: no\n"),
    ],
)
def test_outcomes_become_exit_codes_and_one_line(pipeline, capsys, outcome, code, message):
    pipeline.outcome = outcome
    assert call("run", "--input", "a") == code
    assert capsys.readouterr().err == message


def test_interrupt_before_the_job_begins_can_be_resumed(pipeline, capsys):
    pipeline.outcome = KeyboardInterrupt()
    assert call("run", "--input", "a") == ExitCode.INTERRUPTED
    assert "the same command carries on" in capsys.readouterr().err


def test_a_bug_is_not_hidden(pipeline):
    pipeline.outcome = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError):
        cli.main(["run", "--input", "a"])


def test_bench_takes_every_option_of_run_and_writes_json(pipeline, capsys, tmp_path):
    pipeline.outcome = dict(STATS)
    path = tmp_path / "figures.json"
    assert call("bench", "throughput", "--input", "a", "--max-num-seqs", "8", "--json", str(path)) == 0
    assert pipeline.calls[0]["max_num_seqs"] == (8, "flag")
    assert json.loads(path.read_text()) == STATS
    assert "345.6 output tokens/s, 1,036.8 in all" in capsys.readouterr().out
    call("bench", "throughput", "--help")
    words = set(capsys.readouterr().out.replace("/", " ").split())
    assert {"--" + member.name.replace("_", "-") for _, member in iter_options()} <= words


@pytest.mark.parametrize(
    ("flags", "more"),
    [([], (False, None)), (["--agreement"], (True, None)), (["--agreement-with", "m"], (False, "m"))],
)
def test_bench_asks_for_agreement(pipeline, capsys, flags, more):
    pipeline.outcome = {**STATS, "agreement_tokens_mean": 12.34, "agreement_seconds": 90.0}
    assert call("bench", "throughput", "--input", "a", *flags) == 0
    assert pipeline.more == more
    assert "12.3 tokens in the mean before the first difference" in capsys.readouterr().out


def test_bench_refuses_an_unwritable_file_before_it_measures(pipeline, capsys, tmp_path):
    assert call("bench", "throughput", "--input", "a", "--json", str(tmp_path / "no" / "f.json")) == ExitCode.USAGE
    assert pipeline.calls == []
