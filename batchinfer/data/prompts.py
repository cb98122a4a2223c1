"""Rows to requests: finds the prompt, applies the chat template, tokenises in batches and bounds max_tokens. Driven by
the feeder's thread and by LLM; a row that cannot be answered becomes an error result."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from batchinfer.data.columns import is_missing
from batchinfer.data.earlier_lengths import EarlierLengths
from batchinfer.data.length_column import length_groups
from batchinfer.data.messages import parse_messages
from batchinfer.data.prompt_source import PromptSource, choose_source
from batchinfer.data.row_params import NO_PARAM_COLUMNS, ParamColumns, choose_param_columns, require_in_vocabulary
from batchinfer.data.tokenizer import Tokenizer
from batchinfer.errors import ErrorCode, RowError, UsageError
from batchinfer.request import Request, RequestId, Result, SamplingParams, make_noise_key

if TYPE_CHECKING:
    from batchinfer.data.readers import RowBatch

__all__ = ["ParamColumns", "PromptBuilder", "PromptSource", "choose_param_columns", "choose_source"]

TokenIds = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBuilder:
    """Builds the requests of rows.

    max_model_len: most tokens of prompt and completion. seed: the job's. on_too_long: error, truncate-left (keeps the
    prompt's end, and a BOS that begins it) or truncate-right (keeps its beginning); a prompt is too long where it
    leaves no room for one token, or, for scoring only (max_tokens 0), is itself longer than max_model_len.
    length_class_column: the column of Request.length_group.
    Raises UsageError for messages without a chat template, and for default parameters outside the vocabulary.
    """

    source: PromptSource
    tokenizer: Tokenizer
    defaults: SamplingParams
    vocab_size: int
    max_model_len: int
    param_columns: ParamColumns = NO_PARAM_COLUMNS
    seed: int = 0
    on_too_long: str = "error"
    earlier_lengths: EarlierLengths | None = None
    length_class_column: str | None = None

    def __post_init__(self) -> None:
        if self.source.kind == "messages":
            self.tokenizer.require_chat_template()
        try:
            require_in_vocabulary(self.defaults, self.vocab_size)
        except ValueError as error:
            raise UsageError(f"{error} (the model's vocabulary)") from None

    @property
    def columns(self) -> tuple[str, ...]:
        """The input columns that `build` reads."""
        own = () if self.length_class_column is None else (self.length_class_column,)
        return tuple(dict.fromkeys(self.source.columns + self.param_columns.names + own))

    def build(self, shard_index: int, batch: "RowBatch") -> list[Request | Result]:
        """Requests of the batch in row order, a row's n samples one after the other; a bad row is one error Result."""
        values: list[Any] = self.source.values(batch.table)
        for offset, message in batch.errors.items():
            values[offset] = RowError(ErrorCode.UNREADABLE_LINE, message)
        params = self.param_columns.parse(batch.table, self.defaults, self.vocab_size)
        column = self.length_class_column
        groups = None if column is None else length_groups(batch.table, column)
        return self.build_values(shard_index, batch.start, values, params, groups)

    def build_values(
        self,
        shard_index: int,
        start: int,
        values: Sequence[Any],
        params: Sequence[SamplingParams | RowError],
        groups: Sequence[str | None] | None = None,
    ) -> list[Request | Result]:
        """The same from the source's values and parameters themselves, for rows start, start + 1, …

        values: text, messages, token ids or a template's columns, by the source's kind; a RowError is passed on.
        groups: of Request.length_group.
        """
        prompts = self._tokenise([self._prompt(value) for value in values])
        entries: list[Request | Result] = []
        rows = zip(prompts, params, groups or [None] * len(prompts), strict=True)
        for row, (prompt, row_params, group) in enumerate(rows, start):
            try:
                entries += self._requests(shard_index, row, _value_or_raise(prompt), _value_or_raise(row_params), group)
            except RowError as error:
                place = RequestId(shard_index, row)
                entries.append(Result(place, "error", error_code=error.code, error_message=error.message))
        return entries

    def _prompt(self, value: Any) -> "str | TokenIds | RowError":
        """The prompt's text, or its token ids where these are given."""
        if isinstance(value, RowError):
            return value
        try:
            if is_missing(value):
                raise RowError(ErrorCode.NULL_PROMPT, f"column `{self.source.column}` is null in this row")
            return self._read(value)
        except RowError as error:
            return error

    def _read(self, value: Any) -> str | TokenIds:
        if self.source.kind == "prompt_token_ids":
            return self._read_token_ids(value)
        if self.source.template is not None:
            return _valid_unicode(self.source.template.render(value))
        if self.source.kind == "messages":
            return _valid_unicode(self.tokenizer.apply_chat_template(parse_messages(value)))
        if not isinstance(value, str):
            kind = type(value).__name__
            raise RowError(ErrorCode.BAD_PROMPT, f"column `{self.source.column}` holds {kind}, not text")
        return _valid_unicode(value)

    def _read_token_ids(self, value: Any) -> TokenIds:
        if isinstance(value, np.ndarray):
            value = value.tolist()
        if not isinstance(value, list | tuple) or not all(type(item) is int for item in value):
            raise RowError(ErrorCode.BAD_PROMPT, "prompt token ids must be a list of integers")
        for token_id in value:
            if not 0 <= token_id < self.vocab_size:
                limits = f"from 0 to {self.vocab_size - 1}"
                raise RowError(ErrorCode.BAD_PROMPT, f"prompt token id {token_id} is outside the vocabulary, {limits}")
        return np.array(value, dtype=np.int32)

    def _tokenise(self, prompts: "list[str | TokenIds | RowError]") -> "list[TokenIds | RowError]":
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        encoded = iter(self.tokenizer.encode_batch(texts, add_special_tokens=self.source.kind != "messages"))
        return [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]

    def _requests(
        self, shard_index: int, row: int, prompt: TokenIds, params: SamplingParams, length_group: str | None
    ) -> list[Request]:
        if not len(prompt):
            raise RowError(ErrorCode.EMPTY_PROMPT, "the prompt has no token, and the tokenizer adds none")
        if int(prompt.max()) >= self.vocab_size:
            beyond = f"the tokenizer gives token id {prompt.max()}, beyond the model's vocabulary of {self.vocab_size}"
            raise RowError(ErrorCode.BAD_PROMPT, beyond)
        prompt = self._fit(prompt, params.max_tokens)
        room = self.max_model_len - len(prompt)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        places = [RequestId(shard_index, row, sample) for sample in range(params.n)]
        return [
            Request(
                place,
                prompt,
                params,
                max_tokens,
                make_noise_key(place, params.seed, self.seed),
                self._expected_tokens(place, params, max_tokens),
                length_group,
            )
            for place in places
        ]

    def _expected_tokens(self, place: RequestId, params: SamplingParams, max_tokens: int) -> int | None:
        """What an earlier run tells of an answer whose length is not known anyway."""
        told = None if self.earlier_lengths is None or params.never_stops else self.earlier_lengths.of(place)
        return None if told is None else min(max_tokens, told)

    def _fit(self, prompt: TokenIds, max_tokens: int | None) -> TokenIds:
        """The prompt, cut where it is too long and may be cut.

        A cut one leaves room for the row's max_tokens (a quarter of max_model_len where it has none), but never for
        more than half of max_model_len.
        """
        is_scored_only = max_tokens == 0
        longest = self.max_model_len - (0 if is_scored_only else 1)
        if len(prompt) <= longest:
            return prompt
        if self.on_too_long == "error":
            what = "is longer than" if is_scored_only else "leaves no room for a completion under"
            ways = "raise --max-model-len or choose --on-too-long truncate-left|truncate-right"
            message = f"the prompt of {len(prompt)} tokens {what} max_model_len = {self.max_model_len}; {ways}"
            raise RowError(ErrorCode.PROMPT_TOO_LONG, message)
        wanted = self.max_model_len // 4 if max_tokens is None else max_tokens
        room = min(wanted, self.max_model_len // 2)
        kept = min(longest, self.max_model_len - room)
        if self.on_too_long == "truncate-right":
            return prompt[:kept]
        if prompt[0] == self.tokenizer.bos_token_id and kept > 1:
            return np.concatenate([prompt[:1], prompt[len(prompt) - kept + 1 :]])
        return prompt[len(prompt) - kept :]


def _value_or_raise(value: Any) -> Any:
    if isinstance(value, RowError):
        raise value
    return value


def _valid_unicode(text: str) -> str:
    """Refuses lone surrogates, which JSON can spell and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError(ErrorCode.BAD_PROMPT, f"the prompt is not valid Unicode: {error.reason}") from None
    return text
