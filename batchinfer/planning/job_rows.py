"""What a job's rows come to: tokens, expected lengths, faults and shared beginnings, read by the code that feeds a run.
Called by plan.py."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from batchinfer.data.feeder import Feeder
from batchinfer.data.job_input import JobInput
from batchinfer.data.prompts import PromptBuilder
from batchinfer.planning.prefixes import PrefixTally
from batchinfer.request import Request, Result

MOST_ROWS = 200_000  # of larger inputs a part is read: every k-th run of _RUN_ROWS
_RUN_ROWS = 256
_KEPT_TOKENS = 20_000_000  # of prompts, up to which requests are kept for the exact forecast

IntArray = npt.NDArray[np.int64]


def expected_tokens(request: Request, default: int | None) -> int:
    """Tokens that a request will generate: what an earlier run tells, else `default` where the answer may end before
    its max_tokens, else those."""
    if request.expected_tokens is not None:
        return request.expected_tokens
    if default is None or request.params.never_stops:
        return request.max_tokens
    return min(request.max_tokens, max(default, request.params.min_tokens))


@dataclass(slots=True)
class JobRows:
    """num_rows: of the job. stride: one row in so many was read; all else is of those that were. The lists have one
    entry a request, a row's samples one after the other."""

    num_rows: int
    stride: int
    num_read: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    row_tokens: list[int] = field(default_factory=list)  # prompt tokens of each row that can be answered
    prompt_tokens: list[int] = field(default_factory=list)
    max_tokens: list[int] = field(default_factory=list)
    expected_tokens: list[int] = field(default_factory=list)
    prefixes: PrefixTally = field(default_factory=lambda: PrefixTally(16))
    requests: list[Request] | None = field(default_factory=list)  # None: not all of the job, or too many to keep
    num_guessed: int = 0  # requests that may end before their max_tokens, and of which no earlier run tells

    @property
    def num_requests(self) -> int:
        return len(self.prompt_tokens)

    def whole(self, count: float) -> int:
        """A count over the rows that were read, scaled to the job."""
        return round(count * self.num_rows / max(1, self.num_read))

    def add(self, request: Request, expected_tokens: int) -> None:
        tokens = request.num_prompt_tokens
        if request.id.sample == 0:
            self.num_read += 1
            self.row_tokens.append(tokens)
        self.prompt_tokens.append(tokens)
        self.max_tokens.append(request.max_tokens)
        self.expected_tokens.append(expected_tokens)
        self.num_guessed += request.expected_tokens is None and not request.params.never_stops
        self.prefixes.add(request.prompt_token_ids)
        if self.requests is not None:
            self.requests.append(request)

    def add_error(self, result: Result) -> None:
        self.num_read += 1
        self.errors[str(result.error_code)] += 1


def read_rows(job: JobInput, builder: PromptBuilder, block_size: int, default_tokens: int | None) -> JobRows:
    """Reads and tokenises the job's rows, or one in k of more than MOST_ROWS. default_tokens: as in
    expected_tokens."""
    stride = -(-job.rows.num_rows // MOST_ROWS)
    rows = JobRows(job.rows.num_rows, max(1, stride), prefixes=PrefixTally(block_size))
    kept = 0
    if rows.stride > 1:
        rows.requests = None
    for entry in _entries(job, builder, rows.stride):
        if isinstance(entry, Result):
            rows.add_error(entry)
            continue
        rows.add(entry, expected_tokens(entry, default_tokens))
        kept += entry.num_prompt_tokens
        if kept > _KEPT_TOKENS:
            rows.requests = None
    return rows


def _entries(job: JobInput, builder: PromptBuilder, stride: int) -> Iterator[Request | Result]:
    def wanted(shard: int, start: int, stop: int) -> npt.NDArray[np.bool_]:
        mask = np.zeros(stop - start, np.bool_)
        rows, first = job.rows.within(shard, start, stop)
        places = first + np.arange(len(rows))
        mask[rows[places // _RUN_ROWS % stride == 0] - start] = True
        return mask

    with Feeder(job.shard_set.shards, job.selection, builder, wanted) as feeder:
        while not feeder.is_exhausted:
            yield from feeder.take(wait=True)


def histogram(counts: Sequence[int]) -> list[tuple[int, int, int]]:
    """(from, to, how many) of token counts in bins that double: [0, 0], [1, 1], [2, 3], [4, 7] … from the first to the
    last bin that holds something."""
    if not counts:
        return []
    bits = [int(count).bit_length() for count in counts]
    tally = Counter(bits)
    return [((1 << bit) >> 1, (1 << bit) - 1, tally[bit]) for bit in range(min(bits), max(bits) + 1)]
