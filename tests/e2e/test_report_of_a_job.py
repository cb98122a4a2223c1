"""The report of a whole job: the figures of its _stats.json stand on the page, and a browser opens it without an error.

The browser is Debian's package chromium, or any Chromium or Chrome in the path.
"""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from report_page import Page
from tiny_jobs import call, write_jsonl

from batchinfer.cli import main as command_line
from batchinfer.units import format_bytes, format_ms

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
NEEDS_BROWSER = pytest.mark.skipif(not any(map(shutil.which, BROWSERS)), reason="needs the package chromium")


def open_in_browser(path: Path, profile: Path) -> tuple[Page, list[str]]:
    """The page as the browser has understood it, and what its console said."""
    browser = next(found for name in BROWSERS if (found := shutil.which(name)))
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--disable-dev-shm-usage")
    logging = ("--enable-logging=stderr", "--v=0", f"--user-data-dir={profile}")
    command = [browser, *options, *logging, "--dump-dom", f"file://{path.absolute()}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    return Page(done.stdout), [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """Forty rows, of which three fail."""
    tmp_path = tmp_path_factory.mktemp("reported")
    rows: list[dict[str, Any]] = [{"id": f"r{n}", "prompt": f"a common beginning, row {n}"} for n in range(40)]
    rows[3]["prompt"] = None
    rows[7]["prompt"] = "x" * 10_000
    rows[9] = {"id": "<script>console.error('run')</script>", "prompt": 5}
    path = write_jsonl(tmp_path / "in.jsonl", rows)
    options = ("--max-tokens", 12, "--max-num-seqs", 8, "--kv-cache-memory", "256KiB")
    assert call(tiny_model, "--input", path, "--output", tmp_path / "out", *options) == 0
    assert command_line._run(["report", str(tmp_path / "out")]) == 0
    return tmp_path / "out"


def test_the_figures_of_a_job_stand_on_its_page(job: Path) -> None:
    check_figures(Page.read(job / "_report.html"), json.loads((job / "_stats.json").read_text()))


@NEEDS_BROWSER
def test_a_browser_opens_it_without_an_error(job: Path, tmp_path: Path) -> None:
    page, console = open_in_browser(job / "_report.html", tmp_path / "profile")
    assert console == []
    check_figures(page, json.loads((job / "_stats.json").read_text()))
    assert page.tags.count("svg") == len(list((job / "_report").glob("*.png"))) >= 9
    assert "script" not in page.tags


@pytest.mark.slow
@NEEDS_BROWSER
def test_the_browser_would_have_told_of_an_error(job: Path, tmp_path: Path) -> None:
    source = (job / "_report.html").read_text()
    (tmp_path / "bad.html").write_text(source.replace("</body>", '<img src="https://example.org/x.png"></body>'))
    _, console = open_in_browser(tmp_path / "bad.html", tmp_path / "profile")
    assert len(console) == 1
    assert "Content Security Policy" in console[0]


def check_figures(page: Page, stats: dict[str, Any]) -> None:
    tiles, blocks = page.tiles, stats["kv_blocks"]
    assert tiles["Rows"][0] == str(stats["rows"]) == "40"
    assert tiles["Errors"][0] == str(stats["finish_reasons"]["error"]) == "3"
    assert tiles["Prompt tokens"][0] == f"{stats['prompt_tokens']:,}"
    assert tiles["Output tokens"][0] == f"{stats['completion_tokens']:,}"
    assert tiles["Throughput"][0] == f"{stats['output_tokens_per_s']:,.1f}"
    assert tiles["Total throughput"][0] == f"{stats['total_tokens_per_s']:,.1f}"
    for label, name in (("TTFT p50", "ttft_ms"), ("TBT p50", "tbt_ms"), ("Latency p50", "latency_ms")):
        assert tiles[label] == (format_ms(stats[name]["p50"]), f"p99 {format_ms(stats[name]['p99'])}")
    assert tiles["Mean batch"] == (f"{stats['batch_size']['mean']:.1f}", f"{stats['batch_size']['peak']} at the peak")
    assert tiles["KV cache"][0] == format_bytes(stats["kv_cache_bytes"])
    assert tiles["KV cache"][1] == f"{blocks['peak'] / blocks['total']:.0%} used at the peak"
    assert tiles["Preemptions"][0] == str(stats["preemptions"])
    assert tiles["Peak memory"][0] == format_bytes(stats["peak_memory_bytes"])
    for code, count in stats["errors_by_code"].items():
        assert f"{code} {count} row" in page.text
    assert page.table_row("<script>console.error('run')</script>")[:2] == ["in.jsonl", "9"]
    assert stats["ended_at"][:10] in page.text
    assert stats["threads"] == 1
    assert f"{stats['machine']} (CPU, 1 thread)" in page.text
    assert sum(stats["timeline"]["output_tokens"]) == stats["completion_tokens"]
    assert sum(stats["timeline"]["prompt_tokens"]) == stats["prompt_tokens"]
    assert sum(stats["timeline"]["cached_prompt_tokens"]) == stats["cached_prompt_tokens"]
