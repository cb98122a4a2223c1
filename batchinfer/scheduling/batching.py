"""Which of the waiting sequences may join the batch while it runs. Owned by the scheduler."""

from typing import Protocol

from batchinfer.sequence import Sequence


class Batching(Protocol):
    """A rule that the scheduler asks before each start."""

    def may_join(self, sequence: Sequence, num_running: int) -> bool:
        """Whether the head of the waiting queue may start now."""

    def started(self, sequence: Sequence) -> None:
        """It has started."""

    def close(self) -> None:
        """None waits, or the head does not fit the cache."""


class Continuous:
    """A sequence may start at any time."""

    def may_join(self, sequence: Sequence, num_running: int) -> bool:
        return True

    def started(self, sequence: Sequence) -> None:
        pass

    def close(self) -> None:
        pass


class Static:
    """Batches of up to max_num_seqs sequences in the order of arrival. A batch opens when nothing runs; it closes when
    it is full, when the next does not fit the cache and when none waits; and no other opens until all of it has
    finished. Its prompts may take several steps. Those of its members that are preempted come back to it."""

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._num_free = 0  # places left in the open batch

    def may_join(self, sequence: Sequence, num_running: int) -> bool:
        is_member = sequence.num_preemptions > 0  # waiting members stand before all others
        if num_running == 0 and not is_member:
            self._num_free = self._max_num_seqs
        return is_member or self._num_free > 0

    def started(self, sequence: Sequence) -> None:
        if sequence.num_preemptions == 0:
            self._num_free -= 1

    def close(self) -> None:
        self._num_free = 0
