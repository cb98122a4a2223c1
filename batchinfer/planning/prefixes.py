"""How much of a job's prompts stands at the beginning of an earlier prompt, so that the prefix cache can serve it. Fed
by job_rows.py; holds 8 bytes a block, no tokens."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_Hashes = npt.NDArray[np.uint64]


class PrefixTally:
    """Beginnings of prompts in whole blocks of `block_size` tokens, by a hash of all tokens up to a block's end.

    The hash is the sum of token times a random odd number of its position, modulo 2**64: two different beginnings share
    it with a chance of about 2**-63.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._rng = np.random.default_rng(0)
        self._factors = np.zeros(0, np.uint64)
        self._hashes: list[_Hashes] = []
        self._num_servable: list[int] = []  # blocks of each

    def add(self, prompt_token_ids: npt.NDArray[np.int32]) -> None:
        """The next prompt, in the order of the job."""
        num_blocks = len(prompt_token_ids) // self._block_size
        # The last token is always computed, for its logits, so a prompt's own last block is never served whole.
        self._num_servable.append((len(prompt_token_ids) - 1) // self._block_size)
        tokens = prompt_token_ids[: num_blocks * self._block_size].astype(np.uint64) + np.uint64(1)
        if len(tokens) > len(self._factors):
            more = self._rng.integers(0, 2**63, 2 * len(tokens) - len(self._factors), np.uint64)
            self._factors = np.concatenate([self._factors, more * np.uint64(2) + np.uint64(1)])
        self._hashes.append(np.cumsum(tokens * self._factors[: len(tokens)])[self._block_size - 1 :: self._block_size])

    def sharing(self, order: npt.NDArray[np.int64] | None = None) -> "Sharing":
        """order: in which the prompts start; None: as added."""
        lengths = np.array([len(hashes) for hashes in self._hashes], np.int64)
        servable = np.array(self._num_servable, np.int64)
        cached, shared, groups = (np.zeros(len(lengths), np.int64) for _ in range(3))
        order = np.arange(len(lengths)) if order is None else order
        for level in range(int(lengths.max(initial=0))):
            order = order[lengths[order] > level]
            hashes = np.array([self._hashes[i][level] for i in order.tolist()], np.uint64)
            _, first, same, counts = np.unique(hashes, return_index=True, return_inverse=True, return_counts=True)
            is_common = counts[same] > 1
            if not is_common.any():  # nothing is shared this far, so nothing is further on
                break
            is_first = np.zeros(len(order), np.bool_)
            is_first[first] = True
            cached[order[~is_first & (servable[order] > level)]] += self._block_size
            order = order[is_common]
            shared[order] += self._block_size
            groups[order] = hashes[is_common].astype(np.int64)
        return Sharing(cached, shared, groups)


@dataclass(frozen=True, slots=True)
class Sharing:
    """int64 [prompts], of each. cached: leading tokens that an earlier one has too, what a cache that never forgets
    serves. shared: leading tokens that another one has too, earlier or later. groups: the same number for prompts whose
    shared tokens are equal."""

    cached: npt.NDArray[np.int64]
    shared: npt.NDArray[np.int64]
    groups: npt.NDArray[np.int64]
