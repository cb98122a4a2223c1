"""One request from its entry into the engine to its Result: the sequence, its stop rules and what is gathered along the
way. Owned by the engine."""

import math

import numpy as np
import numpy.typing as npt

from batchinfer.engine.prompt_scores import PromptScores
from batchinfer.engine.stopping import Stop, StopChecker, TextDecoder
from batchinfer.errors import ErrorCode
from batchinfer.request import Request, RequestTimes, Result, TokenLogprob
from batchinfer.sequence import Sequence


class Completion:
    """What the engine keeps of a request beside the scheduler's sequence."""

    def __init__(self, sequence: Sequence, eos_token_ids: frozenset[int], decoder: TextDecoder) -> None:
        params = sequence.request.params
        self.sequence = sequence
        self._checker = StopChecker(sequence.request, eos_token_ids, decoder)
        self._logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        self._prompt_scores = PromptScores(sequence.num_prompt_tokens) if params.prompt_logprobs else None

    def add_prompt_scores(self, start: int, values: npt.NDArray[np.float32]) -> None:
        """values[i] is the score of prompt token start + 1 + i."""
        if self._prompt_scores:
            self._prompt_scores.add(start, values)

    def add_token(self, logprob: TokenLogprob | None) -> Stop | None:
        """After the scheduler has appended a token to the sequence: whether that ends it."""
        if self._logprobs is not None and logprob is not None:
            self._logprobs.append(logprob)
        return self._checker.check(self.sequence.output_tokens)

    def result(self, stop: Stop, times: RequestTimes) -> Result:
        sequence, token_ids = self.sequence, self.sequence.output_token_ids
        return Result(
            id=sequence.request.id,
            finish_reason=stop.finish_reason,
            text=self._checker.text(token_ids, stop),
            token_ids=token_ids,
            stop_reason=stop.stop_reason,
            prompt_tokens=sequence.num_prompt_tokens,
            cached_prompt_tokens=sequence.num_cached_tokens,
            num_preemptions=sequence.num_preemptions,
            times=times,
            cumulative_logprob=self._cumulative_logprob(),
            logprobs=self._logprobs,
            prompt_logprobs=self._prompt_scores.result() if self._prompt_scores else None,
        )

    def _cumulative_logprob(self) -> float | None:
        if self._logprobs is None:
            return None
        return math.fsum(entry.logprob for entry in self._logprobs)


def error_result(request: Request, code: ErrorCode, message: str) -> Result:
    return Result(request.id, "error", error_code=code, error_message=message, prompt_tokens=request.num_prompt_tokens)
