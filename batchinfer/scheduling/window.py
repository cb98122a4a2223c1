"""The rows that have been read and not yet handed to the engine, in the order in which they are to start. Owned by the
loop of a replica."""

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from batchinfer.config import SchedulerConfig
from batchinfer.request import Request
from batchinfer.scheduling.order import packed_order
from batchinfer.scheduling.prefixes import common_tokens

WINDOW_BYTES = 256 << 20  # what waiting rows may take: the whole of all but the largest jobs
_REQUEST_BYTES = 1024  # of a request, beside its token ids
_GROWTH = 0.5  # of the window, since it was last put in order, after which that is done again
_FIRST_FINISHED = 64  # answers after which lengths are worth another look; then at each fourfold number

ExpectedTokens = Callable[[list[Request]], npt.NDArray[np.float64]]


class Window:
    """Rows, each with all of its samples. As they come in they are put in order anew, each time that they have grown by
    half, so that the whole costs little more than sorting once; what was handed out stays where it is, and the rows
    that begin as the last one did come first.

    expected_tokens: how long the answers to requests are likely to be.
    """

    def __init__(self, config: SchedulerConfig, block_size: int, expected_tokens: ExpectedTokens) -> None:
        self._reorders = config.reorders
        self._max_num_seqs = config.max_num_seqs
        self._block_size = block_size
        self._expected_tokens = expected_tokens
        self._ordered: deque[list[Request]] = deque()
        self._arrived: list[list[Request]] = []
        self._num_bytes = 0
        self._last: npt.NDArray[np.int32] | None = None  # the prompt handed out last
        self._num_finished_at_next_look = _FIRST_FINISHED

    def __len__(self) -> int:
        """Rows."""
        return len(self._ordered) + len(self._arrived)

    @property
    def is_full(self) -> bool:
        """Whether no more should be read; in input order, a batch is enough."""
        return self._num_bytes >= WINDOW_BYTES or (not self._reorders and len(self) >= self._max_num_seqs)

    def add(self, requests: Sequence[Request]) -> None:
        """In input order; a row's samples come together, the first of them first."""
        for request in requests:
            if request.id.sample == 0:
                self._arrived.append([])
            self._arrived[-1].append(request)
            self._num_bytes += _bytes_of(request)

    def look(self, num_finished: int) -> None:
        """Puts the rows in order where enough has changed. num_finished: requests answered so far."""
        has_learnt = num_finished >= self._num_finished_at_next_look
        if has_learnt:
            self._num_finished_at_next_look = 4 * num_finished
        if has_learnt or len(self._arrived) > _GROWTH * len(self._ordered):
            self._put_in_order()

    def take(self) -> tuple[list[Request], int]:
        """The next row's requests, and how many tokens of its prompt are to be computed if the row before it is in the
        cache. There must be one."""
        if not self._ordered:
            self._put_in_order()
        row = self._ordered.popleft()
        prompt, last = row[0].prompt_token_ids, self._last
        shared = 0 if last is None else common_tokens(prompt[:-1], last) // self._block_size * self._block_size
        self._last = prompt
        self._num_bytes -= sum(map(_bytes_of, row))
        return row, len(prompt) - shared

    def _put_in_order(self) -> None:
        rows = [*self._ordered, *self._arrived]
        self._arrived = []
        if self._reorders:
            firsts = [row[0] for row in rows]
            prompts = [request.prompt_token_ids for request in firsts]
            expected = self._expected_tokens(firsts)
            order = packed_order(prompts, expected, self._block_size, self._max_num_seqs, self._last)
            rows = [rows[i] for i in order.tolist()]
        self._ordered = deque(rows)


def _bytes_of(request: Request) -> int:
    return _REQUEST_BYTES + request.prompt_token_ids.nbytes
