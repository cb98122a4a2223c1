"""The page and the files of a report: what it shows, that nothing of it is loaded from elsewhere or run as code, and
that the output stays as it was."""

import hashlib
import os
import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from finished_jobs import NOTHING, TIMELINE, WORK, make_rows, make_stats, write_job
from report_page import Page, fetched

from batchinfer.cli import main as cli
from batchinfer.report import roofline_page, write
from batchinfer.report.figures import DrawnPlot, draw, plots
from batchinfer.report.row_figures import RowFigures
from batchinfer.roofline import DevicePeaks

EVIL = "<script>alert('x')</script> & \"quoted\""
PEAKS = DevicePeaks(
    bytes_per_s=20e9, flops_per_s=500e9, measured_on="a bench of <b>its</b> own", date="2026-01-30", threads=2
)
ALL_PLOTS = {
    *("ttft", "latency", "queue_prefill", "tbt", "throughput", "batch_size", "kv_cache", "prompts"),
    *("where_the_time_went", "roofline", "roofline_shares"),
}


def pretend_to_be_the_machine(patch: pytest.MonkeyPatch) -> None:
    """That of make_stats, with peaks."""
    for module in (write, roofline_page):
        patch.setattr(module, "machine_name", lambda device: "a processor of no maker")
    patch.setattr(write, "load_peaks", lambda device, dtype=None, threads=None: PEAKS)


@pytest.fixture(autouse=True)
def _this_machine(monkeypatch):
    pretend_to_be_the_machine(monkeypatch)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> Path:
    """An output with a whole report, its plots drawn."""
    with pytest.MonkeyPatch.context() as patch:
        pretend_to_be_the_machine(patch)
        target = write_job(tmp_path_factory.mktemp("job"), make_rows(), make_stats())
        write.write_report(str(target))
    return target


@pytest.fixture
def source(drawn: Path) -> str:
    return (drawn / "_report.html").read_text(encoding="utf-8")


@pytest.fixture
def _undrawn(monkeypatch):
    """Without the drawings, which take most of the time."""
    monkeypatch.setattr(write, "draw", lambda plot: DrawnPlot(plot, "<svg></svg>", b"PNG"))


def report(target: Path) -> Page:
    return Page.read(Path(write.write_report(str(target)).page))


def contents(folder) -> dict[str, str]:
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.usefixtures("_undrawn")
def test_key_figures_are_those_of_the_run(tmp_path):
    tiles = report(write_job(tmp_path, make_rows(), make_stats())).tiles
    assert tiles["Rows"] == ("12", "")
    assert tiles["Errors"] == ("2", "16.67%")
    assert tiles["Ended by themselves"] == ("3", "7 at their length")
    assert tiles["Prompt tokens"] == ("123,456", "25.0% from the prefix cache")
    assert tiles["Output tokens"][0] == "7,890"
    assert tiles["Throughput"] == ("1,972.5", "output tokens/s")
    assert tiles["Total throughput"][0] == "32,836.5"
    assert tiles["TTFT p50"] == ("2.8 s", "p99 5.0 s")  # of rows that took 0.5 to 5 s
    assert tiles["Wall time"] == ("7.2 s", "inference 4.0 s")
    assert tiles["Mean batch"] == ("10.0", "12 at the peak")
    assert tiles["KV cache"] == ("96 MiB", "75% used at the peak")
    assert tiles["Preemptions"][0] == "2"
    assert tiles["Peak memory"][0] == "1.5 GiB"


@pytest.mark.usefixtures("_undrawn")
def test_header_tables_and_options(tmp_path):
    page = report(write_job(tmp_path, make_rows(), make_stats()))
    for text in ("models/small", "a processor of no maker (CPU)", "/data/in & out.jsonl (12 rows)"):
        assert text in page.text
    assert "2026-01-31 07:08:09 UTC" in page.text
    assert page.table_row("Total latency") == ["5.5 s", "5.5 s", "9.1 s", "9.9 s", "10.0 s"]  # of 1 to 10 s
    assert page.table_row("Time between tokens, each gap") == ["900 ms", "850 ms", "1.5 s", "2.1 s", "2.2 s"]
    assert page.table_row("model") == ["models/small", "flag"]
    assert page.table_row("stop")[1] == "job file"
    assert page.table_row("max_num_seqs") == ["16", "default"]
    assert page.table_row("kv_cache_memory") == ["24MiB", "flag"]
    assert page.table_row("deadline") == ["1h 30m", "flag"]
    slowest = [row[0] for row in page.rows if len(row) == 14][1:]
    assert slowest == [f"row-{number}" for number in range(9, -1, -1)]
    assert page.table_row("row-9")[:6] == ["in & out.jsonl", "9", "9", "1,009", "16", "10"]
    assert page.table_row("row-9")[6:] == ["2.5 s", "2.5 s", "5.0 s", "500 ms", "500 ms", "10.0 s", "0"]
    assert page.table_row("row-10") == ["in & out.jsonl", "10", "10", "row 10 is null"]
    assert "null_prompt 2 rows" in page.text


@pytest.mark.usefixtures("_undrawn")
def test_shares_of_the_peaks(tmp_path):
    """As in test_roofline_shares, over 4 seconds, and over 3.2 in the model."""
    page = report(write_job(tmp_path, make_rows(), make_stats()))
    assert page.table_row("Share of bandwidth") == ["4.1 GB", "5.2%", "6.4%"]
    assert page.table_row("Share of arithmetic") == ["0.89 TFLOP", "44.4%", "55.5%"]
    assert page.table_row("Share of the roofline") == ["≥ 1.8 s", "44.9%", "56.1%"]
    assert page.table_row("Weights read") == ["4.0 GB", "1.0 GB/s", "1.2 GB/s"]
    assert "20.0 GB/s and 500 GFLOP/s, measured on a bench of <b>its</b> own, 2026-01-30" in page.text


@pytest.mark.usefixtures("_undrawn")
@pytest.mark.parametrize("machine", ["here", "elsewhere"])
def test_without_peaks_no_share_is_shown(tmp_path, monkeypatch, machine):
    if machine == "here":
        monkeypatch.setattr(write, "load_peaks", lambda device, dtype=None, threads=None: None)
    stats = make_stats() if machine == "here" else make_stats(machine="another")
    target = write_job(tmp_path, make_rows(), stats)
    page = report(target)
    assert "run batchinfer plan --calibrate" in page.text
    assert ("The job ran on another" in page.text) == (machine == "elsewhere")
    assert not any(row[:1] == ["Share of bandwidth"] for row in page.rows)
    assert page.table_row("Weights read")[0] == "4.0 GB"
    assert {path.stem for path in (target / "_report").iterdir()} == ALL_PLOTS - {"roofline", "roofline_shares"}


def test_peaks_of_the_job_s_precision_come_first(monkeypatch):
    asked = []
    monkeypatch.setattr(write, "load_peaks", lambda *key: asked.append(key))
    assert write.known_peaks(make_stats()) is None
    assert asked == [("cpu", "bf16", None), ("cpu", "bf16"), ("cpu",)]
    asked.clear()
    assert write.known_peaks(make_stats(threads=3)) is None
    assert asked[0] == ("cpu", "bf16", 3)


@pytest.mark.usefixtures("_undrawn")
def test_peaks_of_other_threads_are_told(tmp_path):
    page = report(write_job(tmp_path, make_rows(), make_stats(threads=3)))
    assert "a processor of no maker (CPU, 3 threads)" in page.text
    assert "The job ran with --threads 3, and the peaks were measured with --threads 2." in page.text


@pytest.mark.usefixtures("_undrawn")
def test_nothing_of_a_user_is_code(tmp_path):
    rows = make_rows(3, 1, error_message=EVIL)
    for row in rows:
        row["id"] = EVIL
    options = {name: {"value": EVIL, "source": "flag"} for name in ("model", "chat_template")}
    target = write_job(tmp_path, rows, make_stats(machine=EVIL, options=options, versions={"batchinfer": EVIL}))
    page = report(target)
    assert "script" not in page.tags
    assert page.text.count(EVIL) >= 3 + 1 + 1 + 2 + 1 + 1
    assert "<script" not in (target / "_report.html").read_text()
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]


@pytest.mark.usefixtures("_undrawn")
def test_long_messages_are_cut(tmp_path):
    page = report(write_job(tmp_path, make_rows(1, 1, error_message="m" * 5000), make_stats()))
    assert page.text.count("m" * 400 + "…") == 1


def test_nothing_is_loaded_from_elsewhere(source):
    assert fetched(source) == []
    assert "default-src 'none'" in source
    assert fetched('<img src="a.png"><a href="https://b.c">') == ["a.png", "https://b.c", "https://b.c"]


def test_every_id_and_reference_of_the_page_is_its_own(source):
    """Plots stand side by side in one document: what one refers to must not be found in another."""
    ids = re.findall(r'\bid="([^"]*)"', source)
    assert len(ids) == len(set(ids))
    references = re.findall(r'href="#([^"]*)"', source) + re.findall(r"url\(#([^)]*)\)", source)
    assert len(references) > 50
    assert set(references) <= set(ids)


def test_plots_are_files_too(drawn):
    files = {path.stem: path.read_bytes() for path in (drawn / "_report").iterdir()}
    assert files.keys() == ALL_PLOTS
    assert all(data.startswith(b"\x89PNG\r\n") for data in files.values())


def test_plots_follow_the_reader_s_colours(source):
    """Each colour of a plot is a variable of the page's CSS, which has values for light and for dark."""
    drawings = re.findall(r"<svg.*?</svg>", source, re.DOTALL)
    assert len(drawings) == len(ALL_PLOTS)
    for drawing in drawings:
        assert not re.findall(r"#[0-9a-f]{6}\b", drawing)
        assert set(re.findall(r"var\((--[a-z]+)\)", drawing)) > {"--muted", "--surface"}
    light, dark = source.split("prefers-color-scheme: dark", 1)
    for name in set(re.findall(r"var\((--[a-z]+)\)", source)):
        assert f"{name}:" in light
        if name != "--line":
            assert f"{name}:" in dark


@pytest.mark.usefixtures("_undrawn")
@pytest.mark.parametrize("name", ["job.completions", "job.parquet", "job.jsonl"])
def test_the_output_stays_as_it_was(tmp_path, name, capsys):
    target = write_job(tmp_path, make_rows(), make_stats(), name)
    before = contents(tmp_path)
    assert cli._run(["report", str(target)]) == 0
    after = contents(tmp_path)
    assert {path: after[path] for path in before} == before
    page = target / "_report.html" if target.is_dir() else target.with_name(f"{name}.report.html")
    folder = target / "_report" if target.is_dir() else target.with_name(f"{name}.report")
    assert set(after) - set(before) == {str(page), *(f"{folder}/{plot}.png" for plot in ALL_PLOTS)}
    assert capsys.readouterr().out == f"{page} and 11 plots in {folder}/\n"
    if target.is_dir():
        assert pq.read_table(target).num_rows == 12  # readers of Parquet pass over the report


@pytest.mark.usefixtures("_undrawn")
def test_page_and_plots_where_the_reader_wants_them(tmp_path):
    target = write_job(tmp_path, make_rows(), make_stats())
    page, folder = tmp_path / "new" / "p.html", tmp_path / "plots"
    assert cli._run(["report", str(target), "--output", str(page), "--png-dir", str(folder)]) == 0
    assert Page.read(page).tiles["Rows"][0] == "12"
    assert {path.stem for path in folder.iterdir()} == ALL_PLOTS
    assert {path.name for path in page.parent.iterdir()} == {"p.html"}
    assert not (target / "_report.html").exists()


@pytest.mark.parametrize("place", ["folder", "pipe"])
def test_a_page_that_would_be_no_file_is_refused_before_anything_is_drawn(tmp_path, monkeypatch, place, capsys):
    """A device would be replaced."""
    target = write_job(tmp_path, make_rows(), make_stats())
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(write, "draw", lambda plot: pytest.fail("drawn"))
    assert cli._run(["report", str(target), "--output", str(tmp_path / place)]) == 2
    assert f"--output {tmp_path / place}: is a directory or a device; give the path" in capsys.readouterr().err
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.usefixtures("_undrawn")
def test_a_folder_that_cannot_be_written_is_named(tmp_path, capsys):
    target = write_job(tmp_path, make_rows(), make_stats())
    (tmp_path / "file").write_text("")
    assert cli._run(["report", str(target), "--output", str(tmp_path / "file" / "p.html")]) == 1
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert "choose another --output" in line


@pytest.mark.usefixtures("_undrawn")
def test_counts_of_several_runs_are_told_apart(tmp_path):
    page = report(write_job(tmp_path, make_rows(), make_stats(rows_resumed=5, completions=24)))
    assert page.tiles["Rows"] == ("12", "24 completions, 5 by earlier runs")
    assert "earlier ones had answered 5 rows, the last one 7 rows" in page.text
    assert "of the last run" in page.text
    assert page.tiles["Throughput"][1] == "output tokens/s, last run"
    assert page.table_row("Time between tokens, each gap, last run")[0] == "900 ms"
    assert "earlier ones" not in report(write_job(tmp_path, make_rows(), make_stats(), "other.completions")).text


@pytest.mark.usefixtures("_undrawn")
def test_a_run_that_answered_nothing(tmp_path):
    """Every row failed, or earlier runs had answered all: no step, no times, no rates."""
    names = ("queue_ms", "ttft_ms", "tbt_mean_ms", "tbt_max_ms", "latency_ms", "tbt_ms")
    stats = make_stats(
        **dict.fromkeys(names, NOTHING),
        timeline={name: [] for name in TIMELINE},
        work={**WORK, "steps": 0},
        finish_reasons={"stop": 0, "length": 0, "error": 3},
        busy_seconds=0.0,
    )
    target = write_job(tmp_path, make_rows(0, 3), stats)
    page = report(target)
    assert not (target / "_report").exists()
    assert "No row was answered" in page.text
    assert "no step to make" in page.text
    assert "null_prompt 3 rows" in page.text


@pytest.mark.parametrize(
    "changes",
    [
        {
            "latency_ms": 7.0,
            "ttft_ms": 7.0,
            "queue_ms": 0.0,
            "tbt_mean_ms": None,
            "tbt_p99_ms": None,
            "tbt_max_ms": None,
        },
        {"ttft_ms": 0.0, "queue_ms": 0.0, "prefill_ms": 0.0, "latency_ms": 0.0, "tbt_max_ms": 0.0, "tbt_mean_ms": 0.0},
        {"latency_ms": 9e9, "ttft_ms": 1e-3},
    ],
    ids=["equal-and-no-gaps", "zero", "far-apart"],
)
def test_odd_times_are_drawn(changes):
    rows = make_rows(4, 0, **changes)
    figures = RowFigures()
    for name, distribution in figures.distributions.items():
        distribution.add_many(np.array([row[name] for row in rows if row[name] is not None], np.float64))
    drawn = {one.plot.name: one for one in map(draw, plots(make_stats(timeline={"end_s": []}), figures, None))}
    assert drawn.keys() == {
        "ttft",
        "latency",
        "queue_prefill",
        *(["tbt"] if rows[0]["tbt_mean_ms"] is not None else []),
    }
    for one in drawn.values():
        assert "nan" not in one.svg
        assert one.png.startswith(b"\x89PNG")


def texts(plot: str, stats: dict, rows: list[dict]) -> list[str]:
    """What the drawing of one plot says."""
    figures = RowFigures()
    for name, distribution in figures.distributions.items():
        distribution.add_many(np.array([row[name] for row in rows if row[name] is not None], np.float64))
    (chosen,) = [one for one in plots(stats, figures, None) if one.name == plot]
    return re.findall(r"<text[^>]*>([^<]*)</text>", draw(chosen).svg)


def test_percentiles_of_rows_that_are_alike_share_a_label():
    found = texts("latency", make_stats(), make_rows(4, 0, latency_ms=7.0))
    assert "p50, p90, p99 7 ms" in found
    assert not {"p50 7 ms", "p90 7 ms", "p99 7 ms"} & set(found)
    assert {"p50 2.5 s", "p90 3.7 s", "p99 4.0 s"} <= set(texts("latency", make_stats(), make_rows(4, 0)))


def test_the_axis_of_a_cache_that_was_hardly_used_ends_a_little_above_the_peak():
    """60 blocks of 8000 are 0.75%."""
    stats = make_stats(kv_blocks={"total": 8000, "peak": 60, "mean": 52.5})
    found = texts("kv_cache", stats, make_rows(4, 0))
    assert {"0.0", "0.2", "0.4", "0.6", "0.8"} <= set(found)
    assert "5" not in found  # time ends at 4 s


@pytest.mark.parametrize(
    ("plot", "column", "words"),
    [("batch_size", "waiting_mean", "waiting: none"), ("prompts", "preemptions", "preemptions: none")],
)
def test_what_never_happened_is_said_in_place_of_an_empty_plot(plot, column, words):
    never = make_stats(timeline={**TIMELINE, column: [0, 0, 0]})
    assert words in texts(plot, never, make_rows(4, 0))
    assert words not in texts(plot, make_stats(), make_rows(4, 0))


@pytest.mark.usefixtures("_undrawn")
def test_a_cache_that_was_hardly_used_is_not_called_unused(tmp_path):
    stats = make_stats(kv_blocks={"total": 8000, "peak": 60, "mean": 52.5}, rows=1)
    page = report(write_job(tmp_path, make_rows(), stats))
    assert page.tiles["KV cache"][1] == "under 1% used at the peak"
    assert "1 row, 7,890 output tokens" in page.text


@pytest.mark.usefixtures("_undrawn")
def test_samples_of_one_row_are_told_apart(tmp_path):
    rows = make_rows(2, 0)
    rows[1] |= {"request_id": "0-0-1", "sample_index": 1}
    page = report(write_job(tmp_path, rows, make_stats()))
    assert page.table_row("row-1")[1].split() == ["0·", "1"]
