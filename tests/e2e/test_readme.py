"""The README's commands and its Python are run as they stand, in a copy of what they name, on the tiny model."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from tiny_jobs import read_rows, save_tiny_model, write_jsonl

from batchinfer import llm, pipeline
from batchinfer.cli import main as command_line
from batchinfer.cli.bench import step, throughput
from batchinfer.cli.bench_compare import compare
from batchinfer.cli.bench_kernels import kernels
from batchinfer.cli.build import build
from batchinfer.cli.evaluate import evaluate as evaluate_command
from batchinfer.cli.plan import plan
from batchinfer.cli.quantize import quantize
from batchinfer.cli.report import report
from batchinfer.comparison import child
from batchinfer.config import iter_options
from batchinfer.conversion import quantize_job
from batchinfer.data.result_schema import result_schema
from batchinfer.errors import ErrorCode
from batchinfer.evaluation import evaluate
from batchinfer.executors import step_profile
from batchinfer.models.resolve import ModelFiles, resolve_model
from batchinfer.planning import model_facts

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    return [line for block in blocks("bash") for line in block.splitlines() if line.strip()]


def test_commands_that_install_are_what_the_check_of_everything_runs() -> None:
    check = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    installing = [command for command in commands() if command.startswith("pip install")]
    assert len(installing) == 2
    for command in installing:
        assert f'"{command}"' in check


def runnable() -> list[str]:
    return [command for command in commands() if command.startswith("batchinfer ")]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands read, as in a clone, and the user's own files that they name."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("sample_data", "jobs"):
        source, copy = ROOT / name, folder / name
        copy.mkdir()
        for path in source.iterdir():
            if path.is_file():
                (copy / path.name).write_bytes(path.read_bytes())
    (folder / "shards").mkdir()
    plain = write_jsonl(folder / "plain.jsonl", [{"prompt": f"row {i}"} for i in range(5)])
    with pa.output_stream(folder / "shards" / "a.jsonl.zst", compression="zstd") as file:
        file.write(plain.read_bytes())
    conversations = [{"messages": [{"role": "user", "content": f"question {i}"}]} for i in range(30)]
    write_jsonl(folder / "chats.jsonl", conversations)
    write_jsonl(folder / "texts.jsonl", [{"text": f"A text of its own, number {i}. " * 8} for i in range(20)])
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The samples are longer in bytes than in a real model's tokens."""
    return save_tiny_model(tmp_path_factory.mktemp("long") / "model", context=1024)


@pytest.fixture(autouse=True)
def _every_model_is_the_tiny_one(model: Path, clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(name: str | None, report: Callable[[str], None], *_: str) -> ModelFiles:
        return resolve_model(name if name and Path(name).is_dir() else str(model), report)

    for module in (pipeline, llm, step_profile, quantize_job, evaluate, model_facts):
        monkeypatch.setattr(module, "resolve_model", resolve)
    own_flags = child.flags  # of a process of its own, which none of the above reaches
    monkeypatch.setattr(child, "flags", lambda options: [*own_flags(options), f"--model={model}"])
    monkeypatch.chdir(clone)


def test_the_readme_shows_each_command() -> None:
    assert {command.split()[1] for command in runnable()} == {
        "run",
        "show",
        "plan",
        "report",
        "bench",
        "quantize",
        "evaluate",
    }


def test_commands_run(clone: Path) -> None:
    main_job = next(command for command in commands() if "&& batchinfer run" in command).split("&& ")[1]
    for command in [main_job, *runnable()]:
        assert command_line._run(shlex.split(command)[1:]) == 0, command
    assert len(read_rows(clone / "sample_data" / "prompts.completions")) == 24
    assert len(read_rows(clone / "answers")) == 5
    assert len(read_rows(clone / "answers.jsonl")) == 20
    assert (clone / "quantised" / "config.json").exists()
    assert "<html" in (clone / "sample_data" / "prompts.completions" / "_report.html").read_text(encoding="utf-8")


def test_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (source,) = blocks("python")
    exec(source, {})
    assert re.search(r" (length|stop) [\d.]+$", capsys.readouterr().out.strip().splitlines()[-1])


def test_documented_options_and_columns_are_those_there_are() -> None:
    options = {"--" + member.name.replace("_", "-") for _, member in iter_options()} | {"--job", "--set"}
    for command in (throughput, compare, step, kernels, build, plan, report, quantize, evaluate_command):
        options |= {name for parameter in command.params for name in parameter.opts}
    named = set(re.findall(r"`?(--[a-z][a-z-]+)", README.replace("--no-", "--")))
    assert named - {"--help", "--rows", "--errors"} <= options
    table = README.split("## Output")[1].split("Exit codes")[0]
    documented = {
        name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    }
    assert documented == set(result_schema("", token_ids=True, logprobs=True, prompt_logprobs=True).names)
    row = next(line for line in table.splitlines() if line.startswith("| `error_code`"))
    assert set(re.findall(r"`(\w+)`", row)) - {"error_code", "error_message"} == {str(code) for code in ErrorCode}
