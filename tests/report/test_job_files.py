"""Outputs that no report can be made of: one line says which and what to do."""

import json

import pytest
from finished_jobs import make_rows, make_stats, write_job

from batchinfer.cli import main as cli
from batchinfer.errors import UsageError
from batchinfer.report.job_files import open_job

NAMES = ("job.completions", "job.parquet", "job.jsonl")


@pytest.fixture(params=NAMES)
def target(request, tmp_path):
    return write_job(tmp_path, make_rows(), make_stats(), request.param)


def beside(target, in_directory: str, suffix: str):
    """The file of a directory's name, or of a single file's."""
    return target / in_directory if target.is_dir() else target.with_name(target.name + suffix)


def test_a_finished_job(target):
    job = open_job(str(target))
    assert job.name == target.name
    assert job.stats["prompt_tokens"] == 123_456
    assert job.shard_uri(0) == "/data/in & out.jsonl"


def test_a_job_that_has_not_ended(target):
    beside(target, "_SUCCESS", ".manifest.json").unlink()
    with pytest.raises(UsageError, match=r"not a finished output.*`batchinfer run`"):
        open_job(str(target))


def test_without_the_figures_of_the_run(target):
    path = beside(target, "_stats.json", ".stats.json")
    path.unlink()
    with pytest.raises(UsageError) as error:
        open_job(str(target))
    assert str(error.value).startswith(f"{path}: is missing, and with it the figures of the run;")
    path.write_text("{")
    with pytest.raises(UsageError, match="is damaged"):
        open_job(str(target))


@pytest.mark.parametrize("name", ["timeline", "work", "machine"])
def test_figures_of_an_earlier_version(tmp_path, name):
    stats = make_stats()
    del stats[name]
    target = write_job(tmp_path, make_rows(), stats)
    with pytest.raises(UsageError, match=f"lacks '{name}', as an earlier version .* --overwrite"):
        open_job(str(target))


def test_a_part_that_is_missing_or_cut_short(tmp_path):
    target = write_job(tmp_path, make_rows(), make_stats())
    part = target / "part-00001.parquet"
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(UsageError, match=r"part-00001.parquet: is missing or not what the job wrote"):
        open_job(str(target))
    part.unlink()
    with pytest.raises(UsageError, match=r"part-00001.parquet: is missing"):
        open_job(str(target))
    with pytest.raises(UsageError, match="is one part of an output; give its directory"):
        open_job(str(target / "part-00000.parquet"))


def test_a_damaged_manifest(tmp_path):
    target = write_job(tmp_path, make_rows(), make_stats())
    (target / "_manifest.json").write_text(json.dumps({"shards": []}))
    with pytest.raises(UsageError, match=r"_manifest.json: is missing or damaged"):
        open_job(str(target))


@pytest.mark.parametrize("name", ["absent", "empty"])
def test_the_command_line_says_it_in_one_line(tmp_path, capsys, name):
    (tmp_path / "empty").mkdir()
    assert cli._run(["report", str(tmp_path / name)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("batchinfer: error: ")
    assert str(tmp_path / name) in lines[0]
