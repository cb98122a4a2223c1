"""Data that the `datasets` library keeps: directories made by `save_to_disk`, and hf://datasets/NAME:SPLIT through its
cache. Both come down to Arrow stream files, each of which is one shard."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from batchinfer.data.files import Location, locate
from batchinfer.data.parquet_input import split_by_bytes
from batchinfer.errors import UsageError, first_line

_HUB_SPLIT = re.compile(r"hf://datasets/(?P<name>[^:@]+)(:(?P<config>[^:\[\]]+))?:(?P<split>\w+)")
_HUB_TIMEOUT_S = 5


def is_saved_dataset(directory: Location) -> bool:
    return directory.child("state.json").is_file() or directory.child("dataset_dict.json").is_file()


def saved_dataset_files(directory: Location) -> list[Location]:
    """The Arrow files of a `save_to_disk` directory, in order. Raises UsageError for a DatasetDict of several splits
    and for a layout that today's `datasets` does not write."""
    splits_file = directory.child("dataset_dict.json")
    if splits_file.is_file():
        return saved_dataset_files(_only_split(directory, _read_json(splits_file)))
    state = _read_json(directory.child("state.json"))
    try:
        names = [str(entry["filename"]) for entry in state["_data_files"]]
    except (KeyError, TypeError):
        names = []
    if not names or state.get("_indices_data_files"):
        raise UsageError(f"{directory.uri}: not a directory that `datasets` can load: save it anew with save_to_disk")
    return [directory.child(name) for name in names]


def _only_split(directory: Location, splits: dict[str, Any]) -> Location:
    names = [str(name) for name in splits.get("splits", [])]
    if len(names) != 1:
        choices = ", ".join(directory.child(name).uri for name in names)
        raise UsageError(f"{directory.uri}: holds the splits {', '.join(names)}: give --input one of {choices}")
    return directory.child(names[0])


def _read_json(location: Location) -> dict[str, Any]:
    try:
        with location.open() as file:
            content = json.loads(file.read())
    except (OSError, ValueError) as error:
        raise UsageError(f"{location.uri}: cannot be read ({first_line(error)}): save the dataset anew") from error
    return content if isinstance(content, dict) else {}


def is_hub_split(text: str) -> bool:
    """Written as hf://datasets/NAME:SPLIT, or NAME:CONFIG:SPLIT where the dataset has several configurations."""
    return _HUB_SPLIT.fullmatch(text) is not None


def hub_split_files(text: str) -> list[Location]:
    """Downloads a split of a hub dataset into the cache of `datasets` and gives its Arrow files.

    Raises UsageError: no network (at once, not after the retries of the libraries), unknown name, split or config.
    """
    match = _HUB_SPLIT.fullmatch(text)
    if match is None:
        raise ValueError(f"not a hub split: {text!r}")
    check_hub(text)
    import datasets

    try:
        split = datasets.load_dataset(match["name"], match["config"], split=match["split"])
    except Exception as error:  # the libraries below raise all kinds, and each means: this cannot be had
        raise UsageError(f"{text}: cannot be loaded ({first_line(error)}): check the name and the split") from error
    return [locate(str(entry["filename"])) for entry in split.cache_files]


def check_hub(text: str) -> None:
    """Raises UsageError where the hub does not answer within seconds. With HF_HUB_OFFLINE the cache is used unasked."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=_HUB_TIMEOUT_S)
    except Exception as error:
        raise UsageError(
            f"{text}: {constants.ENDPOINT} cannot be reached ({first_line(error)}): "
            f"check the network, or set HF_HUB_OFFLINE=1 to use a copy in the cache"
        ) from error


def inspect_arrow(location: Location) -> tuple[pa.Schema, int]:
    """(schema, number of rows) of an Arrow stream file."""
    with _open_source(location) as source, pa.ipc.open_stream(source) as reader:
        return reader.schema, sum(batch.num_rows for batch in reader)


def iter_arrow(
    uri: str, schema: pa.Schema, start: int, stop: int, batch_rows: int
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """(row number, slice) over rows [start, stop) in the columns of `schema`. Local files are mapped, not read."""
    position = 0
    with _open_source(locate(uri)) as source, pa.ipc.open_stream(source) as reader:
        for batch in reader:
            end = position + batch.num_rows
            while start < min(end, stop):
                rows = min(batch_rows, min(end, stop) - start)
                for part in split_by_bytes(batch.select(schema.names).slice(start - position, rows)):
                    yield start, part
                    start += part.num_rows
            position = end
            if position >= stop:
                return


def _open_source(location: Location) -> pa.NativeFile:
    return pa.memory_map(location.path) if location.is_local else pa.PythonFile(location.open(), mode="r")
