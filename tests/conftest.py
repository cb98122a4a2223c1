"""Fixtures that several rooms share: the default model (fetched once into the cache) and the bench workloads."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

BENCH = Path(__file__).resolve().parents[2] / "shared" / "bench"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The directory of SmolLM2-135M-Instruct, downloaded on first use as `batchinfer run` does it."""
    from batchinfer.models.resolve import resolve_model

    return resolve_model(None, report=print).path


@pytest.fixture(scope="session")
def bench_rows() -> Any:
    """Function (file name, number of rows) -> rows of a bench workload; skips where the workloads are absent."""

    def read(name: str, rows: int) -> list[dict[str, Any]]:
        path = BENCH / name
        if not path.exists():
            pytest.skip(f"needs the workload {name}")
        return pq.read_table(path).slice(0, rows).to_pylist()

    return read
