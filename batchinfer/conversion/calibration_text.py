"""The text that activations are calibrated on, as token sequences. Called by quantize_job."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from batchinfer.conversion.options import QuantizeOptions
from batchinfer.data.tokenizer import Tokenizer
from batchinfer.errors import RowError, UsageError

SHORTEST = 16  # tokens; what is left of a text below that is dropped
_BUILT_IN = Path(__file__).with_name("calibration.txt")
_TABLES = (".parquet", ".jsonl", ".ndjson", ".gz", ".zst")
_COLUMNS = ("text", "prompt", "messages")  # tried in this order
_FEW_TOKENS = 2048  # below that the choice is poor

TokenIds = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """sequences: token ids, at most --calibration-length each. source: in words. fingerprint: of the ids."""

    sequences: list[TokenIds]
    source: str
    fingerprint: str

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.sequences))

    @property
    def is_small(self) -> bool:
        return self.num_tokens < _FEW_TOKENS


def read_calibration_text(options: QuantizeOptions, tokenizer: Tokenizer) -> CalibrationText:
    """Texts are tokenised as they stand, without BOS, and cut into windows of --calibration-length tokens; of more than
    --calibration-samples windows that many are drawn by --seed. Raises UsageError where the file gives none."""
    source = options.calibration or "the built-in text"
    texts = list(_texts(options, tokenizer))
    windows = [window for ids in _encode(texts, tokenizer) for window in _windows(ids, options.calibration_length)]
    if not windows:
        raise UsageError(f"--calibration {source}: no text of {SHORTEST} tokens or more")
    order = np.random.default_rng(options.seed).permutation(len(windows))[: options.calibration_samples]
    sequences = [windows[index] for index in order]
    digest = hashlib.sha256(b"".join(np.int64(len(ids)).tobytes() + ids.tobytes() for ids in sequences))
    return CalibrationText(sequences, source, digest.hexdigest())


def _encode(texts: Sequence[str], tokenizer: Tokenizer) -> list[TokenIds]:
    return tokenizer.encode_batch(texts, add_special_tokens=False)


def _windows(ids: TokenIds, length: int) -> Iterator[TokenIds]:
    for start in range(0, len(ids), length):
        if len(ids) - start >= SHORTEST:
            yield ids[start : start + length]


def _texts(options: QuantizeOptions, tokenizer: Tokenizer) -> Iterator[str]:
    if options.calibration is None:
        yield _BUILT_IN.read_text(encoding="utf-8")
    elif Path(options.calibration).suffix.lower() in _TABLES or Path(options.calibration).is_dir():
        yield from _column_texts(options, tokenizer)
    else:
        from batchinfer.data.files import read_option_file

        yield read_option_file("--calibration", options.calibration)


def _column_texts(options: QuantizeOptions, tokenizer: Tokenizer) -> Iterator[str]:
    """One column of Parquet or JSON Lines; messages become text by the chat template."""
    from batchinfer.config import InputConfig
    from batchinfer.data.columns import column_values, is_missing
    from batchinfer.data.readers import iter_rows
    from batchinfer.data.shards import discover

    try:
        shards = discover(InputConfig(input=(str(options.calibration),))).shards
    except UsageError as error:
        raise UsageError(str(error).replace("--input", "--calibration")) from error
    for shard in shards:
        column = _column(options, shard.uri, shard.schema.names)
        for batch in iter_rows(shard, 0, None, [column]):
            for value in column_values(batch.table, column) or []:
                if value and not is_missing(value):
                    yield _as_text(value, column, shard.uri, tokenizer)


def _column(options: QuantizeOptions, uri: str, names: Sequence[str]) -> str:
    wanted = (options.calibration_column,) if options.calibration_column else _COLUMNS
    for name in wanted:
        if name in names:
            return name
    raise UsageError(
        f"{uri}: there is no column {' or '.join(wanted)}; name the text's with --calibration-column "
        f"({', '.join(names)})"
    )


def _as_text(value: Any, column: str, uri: str, tokenizer: Tokenizer) -> str:
    if isinstance(value, str):
        return value
    try:
        return tokenizer.apply_chat_template(value)
    except (RowError, TypeError, ValueError) as error:
        raise UsageError(f"{uri}: column {column} holds neither text nor chat messages") from error
