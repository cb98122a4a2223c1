"""jobs/run.sh with a stand-in for the command: what it retries, what it passes through, and how it stops."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

WRAPPER = Path(__file__).parents[2] / "jobs" / "run.sh"
# Notes its arguments, then leaves as the next line of the file `plan` says.
STAND_IN = """#!/usr/bin/env bash
here=$(dirname "$0")
echo "$*" >> "$here/calls"
step=$(sed -n "$(wc -l < "$here/calls")p" "$here/plan")
case $step in
    kill) kill -KILL $$ ;;
    wait) trap 'exit 75' TERM; touch "$here/waiting"; while :; do sleep 0.05; done ;;
    *) exit "$step" ;;
esac
"""


@pytest.fixture
def wrapper(tmp_path):
    command = tmp_path / "batchinfer"
    command.write_text(STAND_IN)
    command.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "BATCHINFER_RETRIES": "2",
        "BATCHINFER_RETRY_SECONDS": "0",
    }

    def start(*steps: str, arguments=("job.toml", "--seed", "1")) -> subprocess.Popen:
        (tmp_path / "plan").write_text("\n".join(steps) + "\n")
        return subprocess.Popen(
            ["bash", WRAPPER, *arguments],
            env=environment,
            stderr=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
        )

    return start


def calls(tmp_path: Path) -> list[str]:
    return (tmp_path / "calls").read_text().splitlines()


@pytest.mark.parametrize("code", [0, 1, 2, 3, 75])
def test_exit_codes_pass_through_at_once(wrapper, tmp_path, code):
    assert wrapper(str(code)).wait(20) == code
    assert calls(tmp_path) == ["run --job job.toml --seed 1"]


def test_a_killed_job_is_started_again(wrapper, tmp_path):
    process = wrapper("kill", "kill", "0")
    assert process.wait(20) == 0
    assert len(calls(tmp_path)) == 3
    assert process.stderr.read().count(b"killed by signal 9") == 2


def test_a_job_that_is_always_killed_ends(wrapper, tmp_path):
    assert wrapper("kill", "kill", "kill", "0").wait(20) == 128 + 9
    assert len(calls(tmp_path)) == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_job_and_75_comes_back(wrapper, tmp_path, number):
    process = wrapper("wait", "0")
    for _ in range(200):
        if (tmp_path / "waiting").exists():
            break
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(20) == 75
    assert len(calls(tmp_path)) == 1


def test_without_a_job_it_says_how(wrapper):
    process = wrapper("0", arguments=())
    assert process.wait(20) == 2
    assert b"usage: jobs/run.sh" in process.stderr.read()
