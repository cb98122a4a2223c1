"""The running state of one Request: its tokens, its place in the batch and its times. Owned by the scheduler, which
appends confirmed tokens; the engine says when it is finished."""

from array import array
from dataclasses import dataclass, field
from enum import Enum

from batchinfer.request import FinishReason, Request


class SequenceStatus(Enum):
    WAITING = "waiting"  # never run yet, or preempted
    RUNNING = "running"  # holds a slot and blocks
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Its tokens are its prompt and its confirmed output. While it runs, scheduling/running_table has, by slot, what
    changes in every step."""

    request: Request
    arrival_time: float  # seconds, time.monotonic; when it entered the waiting queue
    cache_domain: str = ""  # what its KV depends on beside the tokens, see cache.block_pool.key_domain

    # Confirmed ones, written by Scheduler.commit; packed, as each step appends to all that run.
    output_tokens: "array[int]" = field(default_factory=lambda: array("i"))
    token_times: "array[float]" = field(default_factory=lambda: array("d"))  # seconds; one a confirmed token
    first_scheduled_time: float | None = None  # written by the scheduler

    status: SequenceStatus = SequenceStatus.WAITING
    # Positions whose KV is ever written: the last sampled token is an answer, never an input.
    num_tokens_to_compute: int = field(init=False)
    length_class: int = 0  # of scheduling.lengths.OutputLengths; written by the scheduler
    slot: int = -1  # row in the persistent batch while running
    num_in_flight_tokens: int = 0  # tokens that steps in flight will sample for one that was preempted
    num_cached_tokens: int = 0  # prompt tokens served by the prefix cache when first admitted
    num_preemptions: int = 0
    num_lost_tokens: int = 0  # of them the KV was given up at the last preemption

    finish_reason: FinishReason | None = None
    stop_reason: str | None = None

    def __post_init__(self) -> None:
        self.num_tokens_to_compute = self.num_prompt_tokens + max(0, self.request.max_tokens - 1)

    @property
    def num_prompt_tokens(self) -> int:
        return self.request.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """output_tokens as a new list."""
        return self.output_tokens.tolist()

    @property
    def num_confirmed_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.output_tokens)

    @property
    def max_num_tokens(self) -> int:
        """Tokens at which it ends by length."""
        return self.num_prompt_tokens + self.request.max_tokens
