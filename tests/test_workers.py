"""How conftest.py divides a run of all tests: a worker a processor, and one process where tests are chosen."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("xdist")
pytestmark = [
    pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processes are not bound to processors here"),
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one processor"),
    pytest.mark.skipif(
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 6 << 30, reason="a worker takes 3 GiB of memory"
    ),
]
TESTS = """
import json, os, pathlib, time
import pytest

@pytest.mark.parametrize("number", range(40))
def test_says_where_it_runs(number):
    time.sleep(0.01)
    where = os.environ.get("PYTEST_XDIST_WORKER"), sorted(os.sched_getaffinity(0))
    pathlib.Path(__file__).with_name(f"{number}.json").write_text(json.dumps(where))
"""


def places(folder: Path, *options: str) -> set[tuple[str | None, tuple[int, ...]]]:
    """Worker and processors of each test of a run that may use them all."""
    (folder / "tests").mkdir()
    (folder / "pytest.ini").write_text("[pytest]\ntestpaths = tests")
    (folder / "tests" / "test_places.py").write_text(TESTS)
    shutil.copy(Path(__file__).with_name("conftest.py"), folder / "tests")
    code = f"import os, sys, pytest; os.sched_setaffinity(0, {all_processors()}); sys.exit(pytest.main(sys.argv[1:]))"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-c", code, *options]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert "40 passed" in done.stdout, done.stdout + done.stderr
    found = [json.loads(path.read_text()) for path in (folder / "tests").glob("*.json")]
    return {(worker, tuple(processors)) for worker, processors in found}


def all_processors() -> list[int]:
    """Those of this machine that a process may be bound to, of which a worker has a part."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, before)
    return sorted(usable)


def test_workers_share_the_processors_out(tmp_path: Path) -> None:
    found = places(tmp_path)
    assert 2 <= len(found) <= 8
    assert len({worker for worker, _ in found}) == len(found)
    assert sorted(place for _, processors in found for place in processors) == all_processors()


@pytest.mark.parametrize("options", [["tests/test_places.py"], ["-k", "test_says"], ["-n", "0"]])
def test_chosen_tests_stay_in_one_process(tmp_path: Path, options: list[str]) -> None:
    assert places(tmp_path, *options) == {(None, tuple(all_processors()))}
