"""The text that activations are calibrated on, as token sequences. Called by quantize_job."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchinfer.conversion.options import QuantizeOptions
from batchinfer.data.built_in_text import BUILT_IN_TEXT
from batchinfer.data.texts import iter_texts
from batchinfer.data.tokenizer import Tokenizer
from batchinfer.errors import UsageError

SHORTEST = 16  # tokens; what is left of a text below that is dropped
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
    """Chat messages become text by the chat template."""
    if options.calibration is None:
        return iter([BUILT_IN_TEXT.read_text(encoding="utf-8")])
    chosen = options.calibration_column
    return iter_texts("--calibration", options.calibration, chosen, _COLUMNS, tokenizer.apply_chat_template)
