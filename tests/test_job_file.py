"""Job files: names, values, settings and every way to get them wrong."""

import tomllib
from pathlib import Path

import pytest

from batchinfer.errors import UsageError
from batchinfer.job_file import parse_settings, read_job_file

ROOT = Path(__file__).parent.parent


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_names_with_dashes_and_underscores(tmp_path):
    path = write(tmp_path, 'input = "a.parquet"\nkv-cache-dtype = "fp8"\nmax_num_seqs = 4\nkv-cache-memory = "24MiB"\n')
    assert read_job_file(path, {}) == {
        "input": ("a.parquet",),
        "kv_cache_dtype": "fp8",
        "max_num_seqs": 4,
        "kv_cache_memory": 25165824,
    }


def test_settings_fill_text_and_lists_and_numbers_given_as_text(tmp_path):
    path = write(tmp_path, 'input = ["{day}/a.parquet", "{day}/b.parquet"]\nmax-tokens = "{most}"\n')
    values = read_job_file(path, {"day": "monday", "most": "64"})
    assert values == {"input": ("monday/a.parquet", "monday/b.parquet"), "max_tokens": 64}


def test_settings_leave_templates_and_json_alone(tmp_path):
    template = "{{ question }} {% if a %}{day}{% endif %}"
    path = write(tmp_path, f"template = '{template}'\nlogit-bias = '{{\"42\": 1}}'\n")
    values = read_job_file(path, {"day": "{question}"})
    assert values == {"template": "{{ question }} {% if a %}{question}{% endif %}", "logit_bias": '{"42": 1}'}


def test_logit_bias_as_a_table(tmp_path):
    assert read_job_file(write(tmp_path, "[logit-bias]\n42 = -1.5\n"), {}) == {"logit_bias": '{"42": -1.5}'}


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ("max-token = 4", {}, "unknown option 'max-token'; did you mean 'max_tokens'"),
        ("zzz = 4", {}, "unknown option 'zzz'; `batchinfer run --help`"),
        ("max-tokens = 1.5", {}, "max-tokens: 1.5 is not a whole number"),
        ("deadline = 2024-01-01", {}, "deadline: .* is not a number"),
        ("max-tokens = 4\nmax_tokens = 5", {}, "stands there twice"),
        ('input = "{day}.parquet"', {}, r"nothing fills \{day\}; give --set day=VALUE"),
        ('input = "a.parquet"', {"day": "x"}, r"--set day: .* has no \{day\} to fill; an option is given by its flag"),
        ("input = ", {}, "is not TOML"),
    ],
)
def test_faults_name_what_and_where(tmp_path, text, settings, message):
    with pytest.raises(UsageError, match=message):
        read_job_file(write(tmp_path, text), settings)


def test_missing_file(tmp_path):
    with pytest.raises(UsageError, match=r"absent\.toml: No such file"):
        read_job_file(tmp_path / "absent.toml", {})


def test_file_that_is_not_text(tmp_path):
    path = tmp_path / "job.toml"
    path.write_bytes(b"input = '\xff'")
    with pytest.raises(UsageError, match="is not TOML"):
        read_job_file(path, {})


def test_settings_are_pairs():
    assert parse_settings(("a=1", "b=x=y", "c=")) == {"a": "1", "b": "x=y", "c": ""}
    with pytest.raises(UsageError, match="write key=value"):
        parse_settings(("a",))
    with pytest.raises(UsageError, match="given twice"):
        parse_settings(("a=1", "a=2"))


def test_the_sample_job_is_valid_and_its_input_is_there():
    values = read_job_file(ROOT / "jobs" / "sample.toml", {})
    assert len(values) == len(tomllib.loads((ROOT / "jobs" / "sample.toml").read_text()))
    for path in values["input"]:
        assert (ROOT / path).exists()
