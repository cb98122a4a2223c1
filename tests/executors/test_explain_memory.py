"""--explain-memory: the budget of a run is what it has allocated."""

import pytest
from tiny_jobs import save_tiny_model

from batchinfer.config import JobConfig
from batchinfer.executors.local import load_engine
from batchinfer.models.resolve import resolve_model


@pytest.mark.parametrize("explains", [True, False])
def test_what_was_allocated_is_shown_where_asked_for(tmp_path, explains):
    path = save_tiny_model(tmp_path / "model", hidden_size=64)
    options = {"model": str(path), "device": "cpu", "dtype": "fp32", "threads": 1, "kv_cache_memory": 1 << 20}
    config = JobConfig.from_options({**options, "explain_memory": explains})
    lines: list[str] = []
    engine = load_engine(config, resolve_model(str(path)), lines.append)
    # 2 layers, embedding and head of 260 rows, 5 norms; all of 64 columns
    layer = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64
    weights = 4 * (2 * layer + 2 * 260 * 64 + 5 * 64)
    shown = [line for line in lines if line.startswith(("weights  ", "KV cache  ", "in all"))]
    if explains:
        assert shown[0] == f"weights     {f'{weights / 1024:.0f} KiB':>10}"
        assert shown[1].split()[2:4] == ["1", "MiB"]
        assert engine.kv_cache_bytes == 1 << 20
    assert len(shown) == (3 if explains else 0)
