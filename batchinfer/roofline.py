"""What this machine's devices reach at best, and what steps of a model took on them, in one small file a user and
machine. Written by executors/device_profile, read by planning/ and report/."""

import json
import os
import platform
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from batchinfer.cache_directory import cache_directory

_FILE = "machine_profile.json"
_FORMAT = 2
_CPU_INFO = Path("/proc/cpuinfo")
_NVIDIA = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True, slots=True)
class DevicePeaks:
    """The two roofs of a device, as measured with plain library operations.

    bytes_per_s: reading memory that no cache holds. flops_per_s: a large matrix product in one dtype. measured_on: the
    device in words, with its dtype and threads. date: as in 2026-01-31. threads: of a CPU that took part; 0 on a GPU.
    """

    bytes_per_s: float
    flops_per_s: float
    measured_on: str
    date: str
    threads: int


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a step of one model as a sum of parts, fitted to steps that were timed.

    token_counts, tokens_s: the time of a step of so many tokens without what follows; between them it is linear.
    sample_s: of each token sampled. cache_token_s: of each cached token that a sequence of the step reads. pair_s: of
    each pair of a query and a key that it sees. error: mean relative deviation from the timed steps. measured_on and
    date: as of DevicePeaks.
    """

    token_counts: tuple[int, ...]  # rising
    tokens_s: tuple[float, ...]
    sample_s: float
    cache_token_s: float
    pair_s: float
    error: float
    measured_on: str
    date: str


def machine_name(device: str) -> str:
    """The processor or the first GPU in words, without loading any library for it. device: "cpu" or "cuda"."""
    if device == "cuda":
        for information in sorted(_NVIDIA.glob("*/information")):
            return _field(information.read_text(), "Model") or "NVIDIA GPU"
        return "CUDA device"
    text = _CPU_INFO.read_text() if _CPU_INFO.exists() else ""
    return _field(text, "model name") or platform.processor() or platform.machine()


def load_peaks(device: str, dtype: str | None = None, threads: int | None = None) -> DevicePeaks | None:
    """The peaks measured on this machine with the most threads, the last of these; None where there are none. device:
    "cpu" or "cuda". dtype: of the product, as in "bf16"; None takes any. threads: those of so many alone."""
    found = [entry for entry in _read()["peaks"] if _is_about(entry, device=device, machine=machine_name(device))]
    found = [entry for entry in found if dtype in (None, entry["dtype"]) and threads in (None, entry["threads"])]
    return _made(DevicePeaks, sorted(found, key=lambda entry: entry["threads"])[-1]) if found else None


def save_peaks(device: str, dtype: str, peaks: DevicePeaks) -> None:
    """In place of earlier ones of the same machine, device, dtype and threads. Raises OSError."""
    key = {"device": device, "machine": machine_name(device), "dtype": dtype, "threads": peaks.threads}
    _save("peaks", key, asdict(peaks))


def load_step_times(key: Mapping[str, Any]) -> StepTimes | None:
    """The times of steps under exactly these circumstances, on this machine; None where none were measured.

    key: device, and all else that decides how long a step takes: the model, its precision, the threads.
    """
    whole = {**key, "machine": machine_name(key["device"])}
    found = [entry for entry in _read()["step_times"] if _is_about(entry, **whole)]
    return _made(StepTimes, found[-1]) if found else None


def nearest_step_times(key: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Where none were measured under these circumstances: those in which steps of the same model were timed on this
    machine and that differ from these in the fewest fields, each as what it has in those fields. Empty where the
    key's own were measured, or nothing of the model."""
    same = {"device": key["device"], "machine": machine_name(key["device"]), "model": key["model"]}
    entries = [entry for entry in _read()["step_times"] if _is_about(entry, **same) and key.keys() <= entry.keys()]
    found = [{name: entry[name] for name, value in key.items() if entry[name] != value} for entry in entries]
    fewest = min(map(len, found), default=0)
    return [others for others in found if len(others) == fewest > 0]


def save_step_times(key: Mapping[str, Any], times: StepTimes) -> None:
    """In place of earlier ones with an equal key. Raises OSError."""
    _save("step_times", {**key, "machine": machine_name(key["device"])}, asdict(times))


def profile_path() -> Path:
    """The file. It need not exist."""
    return cache_directory() / _FILE


def _read() -> dict[str, list[dict[str, Any]]]:
    """The well-formed entries of the file's two lists; none where it is absent or of another version, and none that are
    damaged: it only holds measurements, which can be repeated."""
    nothing: dict[str, list[dict[str, Any]]] = {"peaks": [], "step_times": []}
    try:
        content = json.loads(profile_path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return nothing
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        return nothing
    lists = {name: found if isinstance(found := content.get(name), list) else [] for name in nothing}
    return {name: [entry for entry in found if _is_well_formed(name, entry)] for name, found in lists.items()}


def _is_well_formed(name: str, entry: object) -> bool:
    """Whether it has the fields of its list, of their types, and those that tell entries apart."""
    kind, keys = (
        (DevicePeaks, ("device", "machine", "dtype")) if name == "peaks" else (StepTimes, ("device", "machine"))
    )
    types = {**dict.fromkeys(keys, str), "threads": int, **get_type_hints(kind)}
    if not isinstance(entry, dict) or not all(_is_of(entry.get(field), types[field]) for field in types):
        return False
    return kind is DevicePeaks or 0 < len(entry["token_counts"]) == len(entry["tokens_s"])


def _is_of(value: object, kind: Any) -> bool:
    """Whether a value out of JSON is of the type, one of the fields of DevicePeaks and StepTimes."""
    if items := get_args(kind):
        return isinstance(value, list) and all(_is_of(item, items[0]) for item in value)
    return isinstance(value, int | float if kind is float else kind) and not isinstance(value, bool)


def _save(name: str, key: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Replaces the file whole, so that no reader sees half of it."""
    content = _read()
    content[name] = [entry for entry in content[name] if not _is_about(entry, **key)] + [{**key, **values}]
    path = profile_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
        file.write(json.dumps({"format": _FORMAT, **content}, indent=1) + "\n")
    os.replace(file.name, path)


def _is_about(entry: Mapping[str, Any], **key: Any) -> bool:
    return all(entry.get(name) == value for name, value in key.items())


def _made(kind: type[Any], entry: Mapping[str, Any]) -> Any:
    values = {member.name: entry[member.name] for member in fields(kind)}
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def _field(text: str, name: str) -> str | None:
    """The value of the first line "name : value"."""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip().lower() == name.lower():
            return value.strip() or None
    return None
