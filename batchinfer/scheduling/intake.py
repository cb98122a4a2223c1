"""Hands rows from the window to the waiting queue, which is kept as short as the next step allows: what waits there can
no longer be put into a better order. Owned by the loop of a replica, and by planning/ for the same loop without one."""

from collections import deque
from collections.abc import Callable

from batchinfer.config import SchedulerConfig
from batchinfer.request import Request
from batchinfer.scheduling.window import Window


class Intake:
    """num_waiting: requests in the waiting queue. start: takes a row's requests there."""

    def __init__(
        self,
        config: SchedulerConfig,
        window: Window,
        num_waiting: Callable[[], int],
        start: Callable[[list[Request]], None],
    ) -> None:
        self.num_finished = 0  # requests; written by the owner
        self._config = config
        self._window = window
        self._num_waiting = num_waiting
        self._start = start
        self._waiting_tokens: deque[int] = deque()  # that the requests handed out last are to compute

    def top_up(self) -> None:
        """Before each step."""
        self._window.look(self.num_finished)
        while len(self._window) and self._has_room():
            row, num_tokens = self._window.take()
            self._start(row)
            self._waiting_tokens += [num_tokens, *[1] * (len(row) - 1)]

    def _has_room(self) -> bool:
        """Whether another row could start in the next step, as far as can be told."""
        num_waiting = self._num_waiting()
        while len(self._waiting_tokens) > num_waiting:
            self._waiting_tokens.popleft()
        tokens_suffice = self._config.reorders and sum(self._waiting_tokens) >= self._config.max_num_batched_tokens
        return num_waiting < self._config.max_num_seqs and not tokens_suffice
