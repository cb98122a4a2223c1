"""Fixtures that several rooms share: the default model (fetched once into the cache) and the bench workloads. And a run
of everything is divided among the machine's processors, where pytest-xdist is installed."""

import os
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

BENCH = Path(__file__).resolve().parents[2] / "shared" / "bench"
MOST_WORKERS = 8
WORKER_BYTES = 3 << 30  # of the machine's memory; the tests that take most take half of it


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Workers for a run that names no files, tests or -n itself; tests that are chosen or debugged stay in this
    process."""
    option = config.option
    chooses = option.keyword or config.getoption("lf", False) or config.args_source is not config.ArgsSource.TESTPATHS
    stays = option.collectonly or option.usepdb or option.trace or hasattr(config, "workerinput")
    if chooses or stays or not config.pluginmanager.hasplugin("xdist") or option.numprocesses is not None:
        return
    workers = min(len(processors()), memory_bytes() // WORKER_BYTES, MOST_WORKERS)
    if workers > 1:
        option.numprocesses = workers
        option.dist = "worksteal"  # keeps neighbours, which share fixtures, together as long as may be


def pytest_configure(config: pytest.Config) -> None:
    """A worker has its own share of the processors, and the processes that it starts have no other: what is being
    tested takes a thread for each processor, and more threads than processors wait for each other."""
    if worker := getattr(config, "workerinput", None):
        mine = processors()[int(worker["workerid"].removeprefix("gw")) :: worker["workercount"]]
        if mine and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, mine)


def memory_bytes() -> int:
    """Of the machine, or of the container that this runs in."""
    total = int(psutil.virtual_memory().total)
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return total
    return total if limit == "max" else min(total, int(limit))


def processors() -> list[int]:
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return sorted(usable)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The directory of SmolLM2-135M-Instruct, downloaded on first use as `batchinfer run` does it."""
    from batchinfer.models.resolve import resolve_model

    return resolve_model(None, report=print).path


@pytest.fixture(scope="session")
def common_folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A folder of this run of tests that all its workers see."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if hasattr(request.config, "workerinput") else folder


@pytest.fixture(scope="session")
def bench_rows() -> Any:
    """Function (file name, number of rows) -> rows of a bench workload; skips where the workloads are absent."""

    def read(name: str, rows: int) -> list[dict[str, Any]]:
        path = BENCH / name
        if not path.exists():
            pytest.skip(f"needs the workload {name}")
        return pq.read_table(path).slice(0, rows).to_pylist()

    return read
