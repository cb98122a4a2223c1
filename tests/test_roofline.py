"""The file of a machine's measurements: what is written is found again, and only under the same circumstances."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchinfer import roofline
from batchinfer.roofline import (
    DevicePeaks,
    StepTimes,
    load_peaks,
    load_step_times,
    nearest_step_times,
    save_peaks,
    save_step_times,
)

PEAKS = DevicePeaks(20e9, 400e9, "some processor, bf16, 2 threads", "2026-01-31", 2)
TIMES = StepTimes((1, 8), (0.01, 0.02), 1e-4, 1e-7, 1e-9, 0.05, "some processor", "2026-01-31")
KEY = {"device": "cpu", "model": "abc", "dtype": "bf16", "threads": 2}


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BATCHINFER_CACHE", str(tmp_path / "cache"))


def test_nothing_is_known_before_anything_was_measured() -> None:
    assert load_peaks("cpu") is None
    assert load_step_times({"device": "cpu", "dtype": "bf16"}) is None


def test_peaks_come_back_by_device_and_dtype() -> None:
    other = DevicePeaks(20e9, 100e9, "some processor, fp32, 2 threads", "2026-02-01", 2)
    save_peaks("cpu", "bf16", PEAKS)
    save_peaks("cpu", "fp32", other)
    assert load_peaks("cpu", "bf16") == PEAKS
    assert load_peaks("cpu", "fp32") == other
    assert load_peaks("cpu") == other  # the last
    assert load_peaks("cuda") is None


def test_a_second_measurement_takes_the_place_of_the_first() -> None:
    save_peaks("cpu", "bf16", PEAKS)
    again = DevicePeaks(21e9, 410e9, "some processor, bf16, 2 threads", "2026-03-01", 2)
    save_peaks("cpu", "bf16", again)
    assert load_peaks("cpu", "bf16") == again
    assert roofline.profile_path().read_text().count("bytes_per_s") == 1


def test_peaks_are_those_of_as_many_threads() -> None:
    one = DevicePeaks(12e9, 210e9, "some processor, bf16, 1 thread", "2026-03-02", 1)
    save_peaks("cpu", "bf16", PEAKS)
    save_peaks("cpu", "bf16", one)
    assert load_peaks("cpu", "bf16", 1) == one
    assert load_peaks("cpu", "bf16", 2) == load_peaks("cpu", "bf16") == PEAKS  # of the most, though not the last
    assert load_peaks("cpu", "bf16", 3) is None


def test_step_times_hold_for_their_circumstances_alone() -> None:
    save_step_times(KEY, TIMES)
    save_peaks("cpu", "bf16", PEAKS)  # the one list leaves the other alone
    assert load_step_times(KEY) == TIMES
    assert load_step_times({**KEY, "threads": 1}) is None
    assert load_step_times({**KEY, "model": "abd"}) is None


def test_the_nearest_circumstances_under_which_steps_of_the_model_were_timed() -> None:
    bf16 = {**KEY, "kv_cache_dtype": "bf16"}
    assert nearest_step_times(bf16) == []
    save_step_times(bf16, TIMES)
    assert nearest_step_times(bf16) == []
    assert nearest_step_times({**bf16, "model": "abd"}) == []
    fp8 = {**KEY, "threads": 1, "kv_cache_dtype": "fp8"}
    assert nearest_step_times(fp8) == [{"threads": 2, "kv_cache_dtype": "bf16"}]
    save_step_times({**bf16, "threads": 1}, TIMES)
    assert nearest_step_times(fp8) == [{"kv_cache_dtype": "bf16"}]
    save_step_times({**fp8, "threads": 4}, TIMES)
    assert nearest_step_times(fp8) == [{"kv_cache_dtype": "bf16"}, {"threads": 4}]
    save_step_times(fp8, TIMES)
    assert nearest_step_times(fp8) == []


def test_another_machine_with_the_same_home_directory_knows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    save_peaks("cpu", "bf16", PEAKS)
    monkeypatch.setattr(roofline, "machine_name", lambda device: "another processor")
    assert load_peaks("cpu") is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 0, "peaks": [{}]}'])
def test_a_damaged_file_counts_as_none(text: str) -> None:
    path = roofline.profile_path()
    path.parent.mkdir()
    path.write_text(text)
    assert load_peaks("cpu") is None
    save_peaks("cpu", "bf16", PEAKS)
    assert load_peaks("cpu") == PEAKS


@pytest.mark.parametrize("name", ["peaks", "step_times"])
@pytest.mark.parametrize("damage", [None, 7, {"threads": 1}, "text"])
def test_a_list_that_is_none_counts_as_empty(name: str, damage: object) -> None:
    save_peaks("cpu", "bf16", PEAKS)
    save_step_times(KEY, TIMES)
    damage_profile(lambda content: content.update({name: damage}))
    assert (load_peaks("cpu"), load_step_times(KEY)) == ((None, TIMES) if name == "peaks" else (PEAKS, None))
    save_peaks("cpu", "bf16", PEAKS)
    save_step_times(KEY, TIMES)
    assert (load_peaks("cpu"), load_step_times(KEY)) == (PEAKS, TIMES)


@pytest.mark.parametrize("name", ["peaks", "step_times"])
def test_entries_that_are_damaged_are_passed_over(name: str) -> None:
    save_peaks("cpu", "bf16", PEAKS)
    save_step_times(KEY, TIMES)

    def damage(content: dict[str, Any]) -> None:
        (entry,) = content[name]
        more_threads = {**entry, "threads": 64}
        fields = [field for field in entry if field != "model"]  # which only some need
        content[name] += [{k: v for k, v in more_threads.items() if k != field} for field in fields]
        content[name] += [{**more_threads, field: wrong} for field in fields for wrong in (None, True, {})]
        content[name] += [None, 5, "text", [], {}, {**more_threads, "threads": "2"}]
        if name == "step_times":
            content[name] += [{**more_threads, "token_counts": counts} for counts in ([], [1], [1, "8"], [1, None])]

    damage_profile(damage)
    assert (load_peaks("cpu"), load_peaks("cpu", "bf16")) == (PEAKS, PEAKS)
    assert load_step_times(KEY) == TIMES
    assert nearest_step_times({**KEY, "threads": 3}) == [{"threads": 2}]


def damage_profile(change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(roofline.profile_path().read_text())
    change(content)
    roofline.profile_path().write_text(json.dumps(content))


def test_the_processor_has_a_name() -> None:
    assert roofline.machine_name("cpu")


def test_the_name_of_a_gpu_is_the_drivers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "0000:01:00.0"
    folder.mkdir()
    (folder / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   \t 17\n")
    monkeypatch.setattr(roofline, "_NVIDIA", tmp_path)
    assert roofline.machine_name("cuda") == "NVIDIA H200"
