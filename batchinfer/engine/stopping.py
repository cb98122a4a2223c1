"""When a completion ends, and what its text then is. One StopChecker a running request, made and asked by the engine.

A completion ends at the first of: an end-of-sequence token, one of its stop token ids, one of its stop strings, its
max_tokens. `token_ids` always keep every generated token, the one that stopped it included, as vLLM has it; the text
leaves out a stop token and is cut at the first character of a stop string, unless the row asks to keep them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from batchinfer.request import FinishReason, Request


class Detokenizer(Protocol):
    """data.detokenizer.IncrementalDetokenizer, as far as it is used here."""

    def add(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class TextDecoder(Protocol):
    """data.tokenizer.Tokenizer, as far as the engine uses it."""

    def decode(self, token_ids: Sequence[int], prompt_token_ids: Sequence[int] = ()) -> str: ...

    def detokenizer(self, prompt_token_ids: Sequence[int] = ()) -> Detokenizer: ...


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a completion ended, as the result says it, and how many of its tokens its text is made of."""

    finish_reason: FinishReason
    stop_reason: str | None
    num_text_tokens: int


class StopStrings:
    """Looks for stop strings in text that grows by pieces, whatever the pieces.

    Of several matches the one completed first counts (of those, the longest), so that where the pieces end does not
    matter.
    """

    def __init__(self, stop: Sequence[str], include_stop_str_in_output: bool) -> None:
        self._stop = stop
        self._include = include_stop_str_in_output
        self._num_searched = 0  # a match that ends within these characters does not count
        self.text = ""  # cut, once a stop string is found

    def extend(self, piece: str, may_match: bool) -> str | None:
        """The stop string that the piece completes. may_match: False before min_tokens, for good."""
        self.text += piece
        matches = [match for stop in self._stop if (match := self._find(stop))] if may_match else []
        self._num_searched = len(self.text)
        if not matches:
            return None
        end, start, stop = min(matches)
        self.text = self.text[: end if self._include else start]
        return stop

    def _find(self, stop: str) -> tuple[int, int, str] | None:
        """(end, start, stop) of its first occurrence that is not wholly in searched text."""
        start = self.text.find(stop, max(0, self._num_searched - len(stop) + 1))
        return (start + len(stop), start, stop) if start >= 0 else None


class StopChecker:
    """The end of one request's completion. Detokenises token by token where there are stop strings to look for, else
    once at the end; the text is the same."""

    def __init__(self, request: Request, eos_token_ids: frozenset[int], decoder: TextDecoder) -> None:
        params = request.params
        self._request = request
        self._decoder = decoder
        self._eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        self._stop_token_ids = frozenset(params.stop_token_ids)
        self._strings: StopStrings | None = None
        if params.stop:
            self._strings = StopStrings(params.stop, params.include_stop_str_in_output)
            self._detokenizer = decoder.detokenizer(request.prompt_token_ids.tolist())

    def check(self, output_token_ids: Sequence[int]) -> Stop | None:
        """To be called after each token, with all tokens so far."""
        token_id, num_tokens = output_token_ids[-1], len(output_token_ids)
        may_stop = num_tokens > self._request.params.min_tokens
        if may_stop and (token_id in self._eos_token_ids or token_id in self._stop_token_ids):
            return self._stop_at_token(token_id, num_tokens)
        matched = None
        if self._strings:
            matched = self._strings.extend(self._detokenizer.add(token_id), may_stop)
        if matched is None and num_tokens < self._request.max_tokens:
            return None
        return self._end(matched, "length", None, num_tokens)

    def _stop_at_token(self, token_id: int, num_tokens: int) -> Stop:
        matched = None
        keep = self._request.params.include_stop_str_in_output
        if self._strings and keep:
            matched = self._strings.extend(self._detokenizer.add(token_id), True)
        stop_reason = None if token_id in self._eos_token_ids else str(token_id)
        return self._end(matched, "stop", stop_reason, num_tokens if keep else num_tokens - 1)

    def _end(self, matched: str | None, reason: FinishReason, stop_reason: str | None, num_text_tokens: int) -> Stop:
        """Bytes held back until now may complete a stop string too."""
        if self._strings and matched is None:
            may_stop = num_text_tokens > self._request.params.min_tokens
            matched = self._strings.extend(self._detokenizer.finish(), may_stop)
        if matched is not None:
            return Stop("stop", matched, num_text_tokens)
        return Stop(reason, stop_reason, num_text_tokens)

    def text(self, output_token_ids: Sequence[int], stop: Stop) -> str:
        """The completion's text, after `check` has given `stop`."""
        if self._strings:
            return self._strings.text
        prompt = self._request.prompt_token_ids[-4:].tolist()  # where a character cut in two can begin
        return self._decoder.decode(output_token_ids[: stop.num_text_tokens], prompt)
