"""What a job reads: its shards, which of their rows, and where in a row the prompt and the parameters are. Read by the
pipeline before any model is loaded."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from batchinfer.config import InputConfig, JobConfig
from batchinfer.data.columns import column_values
from batchinfer.data.earlier_lengths import EarlierLengths
from batchinfer.data.length_column import describe_groups, require_length_column
from batchinfer.data.prompts import ParamColumns, PromptBuilder, PromptSource, choose_param_columns, choose_source
from batchinfer.data.readers import iter_rows
from batchinfer.data.row_map import RowMap, Selection
from batchinfer.data.row_params import STEER_OR_DATA
from batchinfer.data.selection import select_rows
from batchinfer.data.shards import ShardSet, discover
from batchinfer.data.tokenizer import Tokenizer
from batchinfer.data.unique_ids import find_duplicate_ids
from batchinfer.errors import UsageError
from batchinfer.request import SamplingParams

_ID_COLUMN = "custom_id"  # of the batch files of hosted services, where it must be unique
_SAMPLE_ROWS = 1000  # of each shard, to tell a parameter from data
_SUFFIXES = (".gz", ".zst", ".parquet", ".jsonl", ".ndjson")


@dataclass(frozen=True, slots=True)
class JobInput:
    """The input of a job. selection: per shard the rows to answer, None for all."""

    shard_set: ShardSet
    selection: Selection
    rows: RowMap
    source: PromptSource
    param_columns: ParamColumns
    length_class_column: str | None = None

    @classmethod
    def read(
        cls, config: InputConfig, seed: int, report: Callable[[str], None], output: str | None = None
    ) -> "JobInput":
        """Finds the shards and reports what is read and how. Raises UsageError where they cannot make a job.

        output: where the job writes, which may lie among its input.
        """
        shard_set = discover(config, output)
        for uri, reason in shard_set.skipped:
            report(f"skipped {uri}: {reason}")
        schemas = [shard.schema for shard in shard_set.shards]
        source = choose_source(config, *schemas)
        param_columns = choose_param_columns(config.param_columns, source, *schemas)
        if param_columns.is_auto:
            names = [name for name in param_columns.names if name in STEER_OR_DATA]
            param_columns = param_columns.without_data({name: _sample(shard_set, name) for name in names})
        if config.length_class_column is not None:
            require_length_column(config.length_class_column, schemas)
        selection = select_rows(shard_set, config.limit, config.sample, seed)
        rows = RowMap([shard.num_rows for shard in shard_set.shards], selection)
        report(f"input: {_counted(rows.num_rows, shard_set)}; {source.describe()}; {param_columns.describe()}")
        if config.length_class_column is not None:
            report(describe_groups(config.length_class_column, shard_set, config.limit))
        _check_ids(shard_set, config.unique_id, report)
        return cls(shard_set, selection, rows, source, param_columns, config.length_class_column)

    def builder(
        self,
        config: JobConfig,
        tokenizer: Tokenizer,
        defaults: SamplingParams,
        vocab_size: int,
        max_model_len: int,
        earlier_lengths: EarlierLengths | None,
    ) -> PromptBuilder:
        """Of the job's requests. defaults: the sampling parameters of rows that carry none; the rest as of
        PromptBuilder."""
        return PromptBuilder(
            source=self.source,
            tokenizer=tokenizer,
            defaults=defaults,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            param_columns=self.param_columns,
            seed=config.sampling.seed,
            on_too_long=config.input.on_too_long,
            earlier_lengths=earlier_lengths,
            length_class_column=self.length_class_column,
        )

    def selected(self, shard: int, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """bool [stop - start]: which of the shard's rows the job answers."""
        mask = np.zeros(stop - start, np.bool_)
        mask[self.rows.within(shard, start, stop)[0] - start] = True
        return mask


def _sample(shard_set: ShardSet, column: str) -> list[Any]:
    """The column's values in the first rows of each shard that has it."""
    holders = [shard for shard in shard_set.shards if column in shard.schema.names]
    batches = [batch for shard in holders for batch in iter_rows(shard, 0, _SAMPLE_ROWS, [column])]
    return [value for batch in batches for value in column_values(batch.table, column) or []]


def _counted(num_rows: int, shard_set: ShardSet) -> str:
    shards = len(shard_set.shards)
    of = f" of {shard_set.num_rows:,}" if num_rows != shard_set.num_rows else ""
    rows = f"row{'s' if shard_set.num_rows > 1 else ''}"
    return f"{num_rows:,}{of} {rows} in {shards:,} shard{'s' if shards > 1 else ''}"


def default_output(first_input: str) -> str:
    """INPUT-STEM.completions beside the input. Raises UsageError where that place cannot be written."""
    if first_input.startswith("hf://"):
        raise UsageError(f"--output is missing: there is no place beside {first_input}")
    stem = first_input.rstrip("/")
    if Path(stem).name in ("", ".", ".."):
        stem = str(Path(first_input).resolve())
    for suffix in _SUFFIXES:
        stem = stem.removesuffix(suffix)
    if any(character in stem for character in "*?["):
        folder = str(Path(stem.split("*")[0].split("?")[0].split("[")[0] + "x").parent)
        raise UsageError(f"--output is missing: a glob has no name of its own; as in --output {folder}/completions")
    return f"{stem}.completions"


def _check_ids(shard_set: ShardSet, unique_id: str | None, report: Callable[[str], None]) -> None:
    """A repeated id ends the job where --unique-id names the column, and is only reported for `custom_id`."""
    has_id_column = any(_ID_COLUMN in shard.schema.names for shard in shard_set.shards)
    column = unique_id or (_ID_COLUMN if has_id_column else None)
    if column is None:
        return
    repeated = find_duplicate_ids(shard_set, column, limit=1)
    if not repeated:
        return
    value, first, second = repeated[0]
    where = f"{_place(shard_set, first)} and {_place(shard_set, second)}"
    if unique_id is not None:
        raise UsageError(f"column `{column}` repeats {value!r} in {where}; make it unique or leave out --unique-id")
    report(f"column `{column}` repeats {value!r} in {where}; each row is answered by its place, not by its id")


def _place(shard_set: ShardSet, place: tuple[int, int]) -> str:
    shard, row = place
    return f"{shard_set.shards[shard].uri} row {row}"
