"""What one completion asks for (Request, SamplingParams) and what comes back (Result). Plain data, made by data/ and
engine/; nothing here imports torch."""

import hashlib
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from batchinfer.errors import ErrorCode
from batchinfer.option_field import require

FinishReason = Literal["stop", "length", "error"]
GREEDY_EPSILON = 1e-3  # temperatures below this are greedy: dividing logits by them overflows
MAX_LENGTH_GROUPS = 63  # whose answers' lengths are learnt apart
NO_VALUE = ""  # the length_group of rows that have no value where others have one; it is none of the 63
MAX_N = 16384  # as in vLLM; a typing error in a row must not fill the memory with requests


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the tokens of one completion. Names and meanings follow vLLM's.

    Raises ValueError naming the field and the allowed values.
    """

    max_tokens: int | None = None  # None: the room left up to max_model_len; 0: score the prompt only
    min_tokens: int = 0  # no EOS, stop id or stop string before this many tokens
    temperature: float = 1.0  # 0 (or below GREEDY_EPSILON): greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None  # None: the job's seed with the row's place; given: the row's place does not matter
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, bias) pairs
    n: int = 1
    logprobs: int | None = None  # number of top alternatives a token beside the chosen one; None: off
    prompt_logprobs: bool = False

    def __post_init__(self) -> None:
        require(self.max_tokens is None or self.max_tokens >= 0, "max_tokens", self.max_tokens, "0 or more")
        require(self.min_tokens >= 0, "min_tokens", self.min_tokens, "0 or more")
        fits = self.max_tokens is None or self.min_tokens <= self.max_tokens
        require(fits, "min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        require(0 <= self.temperature < math.inf, "temperature", self.temperature, "0 or more, finite")
        require(self.top_k >= -1, "top_k", self.top_k, "1 or more, or 0 or -1 for off")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        require(0 <= self.min_p <= 1, "min_p", self.min_p, "from 0 to 1")
        require(self.seed is None or -(2**63) <= self.seed < 2**64, "seed", self.seed, "a 64-bit integer")
        require(all(self.stop), "stop", self.stop, "non-empty strings")
        require(0 < self.repetition_penalty < math.inf, "repetition_penalty", self.repetition_penalty, "above 0")
        require(-2 <= self.presence_penalty <= 2, "presence_penalty", self.presence_penalty, "from -2 to 2")
        require(-2 <= self.frequency_penalty <= 2, "frequency_penalty", self.frequency_penalty, "from -2 to 2")
        require(all(math.isfinite(b) for _, b in self.logit_bias), "logit_bias", self.logit_bias, "finite biases")
        require(1 <= self.n <= MAX_N, "n", self.n, f"from 1 to {MAX_N}")
        require(self.logprobs is None or 0 <= self.logprobs <= 100, "logprobs", self.logprobs, "from 0 to 100")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_EPSILON

    @property
    def never_stops(self) -> bool:
        """Nothing but max_tokens ends the answer."""
        return self.ignore_eos and not self.stop and not self.stop_token_ids


@dataclass(frozen=True, slots=True, order=True)
class RequestId:
    """The place of a completion in the job's input: never taken from user data."""

    shard: int
    row: int
    sample: int = 0

    def __str__(self) -> str:
        return f"{self.shard}-{self.row}-{self.sample}"


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to compute.

    prompt_token_ids: int32 [num_prompt_tokens], at least one token, all within the vocabulary.
    max_tokens: params.max_tokens bounded by the room left in max_model_len.
    expected_tokens: of the answer, at most max_tokens, where an earlier run tells; the answer does not depend on it.
    length_group: requests of one group are expected to have answers of like lengths; None: those of like prompts are.
    """

    id: RequestId
    prompt_token_ids: npt.NDArray[np.int32]
    params: SamplingParams
    max_tokens: int
    noise_key: int  # 64 bits, see make_noise_key
    expected_tokens: int | None = None
    length_group: str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)


def make_noise_key(request_id: RequestId, row_seed: int | None, job_seed: int) -> int:
    """The 64-bit key of a completion's sampling noise, so that batch-mates, order and resume do not change it.

    A row that carries its own seed gets the same noise wherever it stands; otherwise its place in the input counts.
    """
    place = (row_seed, request_id.sample) if row_seed is not None else (job_seed, *_place(request_id))
    return int.from_bytes(hashlib.blake2b(repr(place).encode(), digest_size=8).digest(), "little")


def _place(request_id: RequestId) -> tuple[int, int, int]:
    return request_id.shard, request_id.row, request_id.sample


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability (natural, after no filter: of the raw logits) of the chosen token and of the top alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Score of a prompt. The first token has no log-probability, so `count` is num_prompt_tokens - 1."""

    sum: float
    count: int
    per_token: npt.NDArray[np.float32]  # [count]


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Latencies in milliseconds; the clock starts when the request enters the waiting queue.

    ttft = queue + prefill. The tbt figures are over the gaps between tokens, preemption stalls included; None where
    there is no token (ttft) or no gap (tbt).
    """

    queue_ms: float
    prefill_ms: float | None
    ttft_ms: float | None
    tbt_mean_ms: float | None
    tbt_p50_ms: float | None
    tbt_p99_ms: float | None
    tbt_max_ms: float | None
    latency_ms: float


@dataclass(frozen=True, slots=True)
class Result:
    """The answer to one Request. On an error row `text`, `token_ids` and `times` are None."""

    id: RequestId
    finish_reason: FinishReason
    text: str | None = None
    token_ids: list[int] | None = None
    stop_reason: str | None = None  # the stop string, or the stop token's id in decimal; None for EOS and length
    error_code: ErrorCode | None = None
    error_message: str | None = None
    prompt_tokens: int | None = None
    cached_prompt_tokens: int | None = None
    num_preemptions: int | None = None
    times: RequestTimes | None = None
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: PromptLogprobs | None = None

    @property
    def completion_tokens(self) -> int | None:
        return None if self.token_ids is None else len(self.token_ids)

    @property
    def queue_ms(self) -> float | None:
        return None if self.times is None else self.times.queue_ms

    @property
    def prefill_ms(self) -> float | None:
        return None if self.times is None else self.times.prefill_ms

    @property
    def ttft_ms(self) -> float | None:
        return None if self.times is None else self.times.ttft_ms

    @property
    def tbt_mean_ms(self) -> float | None:
        return None if self.times is None else self.times.tbt_mean_ms

    @property
    def tbt_p50_ms(self) -> float | None:
        return None if self.times is None else self.times.tbt_p50_ms

    @property
    def tbt_p99_ms(self) -> float | None:
        return None if self.times is None else self.times.tbt_p99_ms

    @property
    def tbt_max_ms(self) -> float | None:
        return None if self.times is None else self.times.tbt_max_ms

    @property
    def latency_ms(self) -> float | None:
        return None if self.times is None else self.times.latency_ms
