"""The sequences that wait to run, first come first served, preempted ones at the head. Owned by the scheduler."""

from collections import deque
from itertools import islice

from batchinfer.sequence import Sequence, SequenceStatus


class WaitingQueue:
    """Sequences that end while they wait stay in the deque until they reach its head, so that ending one costs the same
    wherever it stands."""

    def __init__(self) -> None:
        self._sequences: deque[Sequence] = deque()
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def append(self, sequence: Sequence) -> None:
        self._sequences.append(sequence)
        self._num_waiting += 1

    def put_back(self, sequence: Sequence) -> None:
        """To the head."""
        self._sequences.appendleft(sequence)
        self._num_waiting += 1

    def head(self) -> Sequence | None:
        """The next to start; None where there is none, or where it must first learn its token in flight."""
        while self._sequences and self._sequences[0].status is SequenceStatus.FINISHED:
            self._sequences.popleft()
        return self._sequences[0] if self._sequences and self._sequences[0].num_in_flight_tokens == 0 else None

    def next_ones(self, count: int) -> list[Sequence]:
        """The first `count` to start, the head first."""
        waiting = (sequence for sequence in self._sequences if sequence.status is not SequenceStatus.FINISHED)
        return list(islice(waiting, count))

    def pop_head(self) -> None:
        self._sequences.popleft()
        self._num_waiting -= 1

    def forget(self) -> None:
        """One of them, whichever it is, has been marked as finished."""
        self._num_waiting -= 1
