"""The energy meter on counters that files stand for."""

import time
from pathlib import Path

import pytest

from batchinfer.energy import EnergyMeter

RANGE = 1_000_000_000


def zone(folder: Path, number: str, name: str, energy_uj: int) -> Path:
    path = folder / f"intel-rapl:{number}"
    path.mkdir(parents=True)
    for file, text in (("name", name), ("energy_uj", energy_uj), ("max_energy_range_uj", RANGE)):
        (path / file).write_text(f"{text}\n")
    return path


def test_packages_are_summed_and_what_lies_in_them_is_not_counted_twice(tmp_path: Path):
    first, second = zone(tmp_path, "0", "package-0", 5_000_000), zone(tmp_path, "1", "package-1", 100)
    others = [zone(tmp_path, "0:0", "core", 0), zone(tmp_path, "2", "psys", 0)]
    with EnergyMeter(tmp_path) as meter:
        (first / "energy_uj").write_text("8000000\n")
        (second / "energy_uj").write_text("500100\n")
        for other in others:
            (other / "energy_uj").write_text("99000000\n")
    assert meter.joules == pytest.approx(3.5)
    assert meter.figures() == {"energy_joules": meter.joules}


def test_counters_that_come_round_are_followed(tmp_path: Path):
    package = zone(tmp_path, "0", "package-0", RANGE - 2_000_000)
    with EnergyMeter(tmp_path, interval_s=0.01) as meter:
        for value in (1_000_000, 600_000_000, 3_000_000):  # 3 J, 599 J, 403 J
            (package / "new").write_text(f"{value}\n")
            (package / "new").replace(package / "energy_uj")
            time.sleep(0.2)
    assert meter.joules == pytest.approx(3 + 599 + 403)


def test_where_a_counter_is_not_readable_there_is_no_figure(tmp_path: Path):
    with EnergyMeter(tmp_path) as meter:
        pass
    assert meter.figures() == {}
    (zone(tmp_path, "0", "package-0", 0) / "energy_uj").unlink()
    zone(tmp_path, "1", "package-1", 0)
    with EnergyMeter(tmp_path) as meter:
        pass
    assert meter.joules is None
