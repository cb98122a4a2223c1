"""The energy that the machine's processor packages take, from Linux's RAPL counters. Plain; used by the pipeline for
`bench throughput`."""

import threading
from contextlib import suppress
from pathlib import Path

_POWERCAP = Path("/sys/class/powercap")
_INTERVAL_S = 30.0  # at 2 kW a counter of 2**16 joules takes 33 s to come round; none known is smaller


class EnergyMeter:
    """Within it, counts the joules of all packages, whoever uses them. joules: None where no counter is readable, as on
    most virtual machines and for users other than root.

    Source: the kernel's powercap documentation: energy_uj counts up to max_energy_range_uj, then from 0 again.
    """

    def __init__(self, powercap: Path = _POWERCAP, interval_s: float = _INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._counters = [zone for zone in sorted(powercap.glob("*:*")) if _is_package(zone)]
        self._last: list[int | None] = []
        self._ranges = [_read(zone, "max_energy_range_uj") for zone in self._counters]
        self._microjoules = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @property
    def joules(self) -> float | None:
        """Since the beginning; call it after the end."""
        return self._microjoules / 1e6 if self._is_readable else None

    def figures(self) -> dict[str, float]:
        """{"energy_joules": …}, or nothing where no counter is readable."""
        return {} if self.joules is None else {"energy_joules": self.joules}

    def __enter__(self) -> "EnergyMeter":
        self._last = [_read(zone, "energy_uj") for zone in self._counters]
        if self._is_readable:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._is_readable:
            self._thread.join()

    @property
    def _is_readable(self) -> bool:
        return bool(self._counters) and None not in (*self._last, *self._ranges)

    def _watch(self) -> None:
        """Reads often enough that no counter comes round twice between two readings."""
        is_over = False
        while not is_over:
            is_over = self._ended.wait(self._interval_s)
            for place, zone in enumerate(self._counters):
                now, last, full = _read(zone, "energy_uj"), self._last[place], self._ranges[place]
                if now is not None and last is not None and full is not None:
                    self._microjoules += now - last if now >= last else now + full - last
                    self._last[place] = now


def _is_package(zone: Path) -> bool:
    """Parts of a package (cores, memory) lie below it and count in it; a platform's zone holds the packages."""
    with suppress(OSError):
        return (zone / "name").read_text(encoding="utf-8").startswith("package")
    return False


def _read(zone: Path, name: str) -> int | None:
    try:
        return int((zone / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
