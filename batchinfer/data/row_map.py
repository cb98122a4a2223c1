"""Which rows a job answers and in which part each stands: a pure function of the input and the options. Used by the
journal's index and the writer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]
Selection = Sequence[npt.NDArray[np.int64] | None]  # per shard: sorted row numbers, or None for all


class RowMap:
    """Numbers the answered rows 0 .. num_rows-1 in output order; that number is a row's position."""

    def __init__(self, shard_rows: Sequence[int], selection: Selection | None = None) -> None:
        chosen = selection if selection is not None else [None] * len(shard_rows)
        if len(chosen) != len(shard_rows):
            raise ValueError(f"selection = {len(chosen)} shards: must be {len(shard_rows)}")
        self._selected = [None if rows is None else np.asarray(rows, np.int64) for rows in chosen]
        self._counts = [n if s is None else len(s) for n, s in zip(shard_rows, self._selected, strict=True)]
        self._first: list[int] = [0, *np.cumsum(self._counts, dtype=np.int64).tolist()]

    @property
    def num_shards(self) -> int:
        return len(self._counts)

    @property
    def num_rows(self) -> int:
        return self._first[-1]

    def shard_positions(self, shard: int) -> tuple[int, int]:
        """[first, last + 1) of a shard's positions."""
        return self._first[shard], self._first[shard + 1]

    def position(self, shard: int, row: int) -> int:
        """KeyError where the row is not among those to answer."""
        if not 0 <= shard < len(self._counts):
            raise KeyError(f"no row {row} in shard {shard}")
        selected = self._selected[shard]
        offset = row if selected is None else int(np.searchsorted(selected, row))
        if not 0 <= offset < self._counts[shard] or (selected is not None and selected[offset] != row):
            raise KeyError(f"no row {row} in shard {shard}")
        return self._first[shard] + offset

    def positions(self, shards: npt.NDArray[Any], rows: npt.NDArray[Any]) -> Positions:
        """Positions of many rows at once; KeyError where one is not among those to answer."""
        result = np.empty(len(rows), np.int64)
        for shard in np.unique(shards).tolist():
            here = np.flatnonzero(shards == shard)
            result[here] = self._shard_positions(shard, np.asarray(rows)[here])
        return result

    def _shard_positions(self, shard: int, rows: npt.NDArray[Any]) -> Positions:
        if not 0 <= shard < len(self._counts):
            raise KeyError(f"no shard {shard}")
        selected = self._selected[shard]
        offsets = rows if selected is None else np.searchsorted(selected, rows)
        fits = (offsets >= 0) & (offsets < self._counts[shard])
        if not fits.all() or (selected is not None and not np.array_equal(selected[offsets], rows)):
            raise KeyError(f"rows of shard {shard} that are not to be answered")
        return self._first[shard] + offsets.astype(np.int64)

    def within(self, shard: int, start: int, stop: int) -> tuple[npt.NDArray[np.int64], int]:
        """(row numbers to answer among rows [start, stop) of the shard, position of the first of them)."""
        selected = self._selected[shard]
        if selected is None:
            stop = min(stop, self._counts[shard])
            return np.arange(start, max(start, stop)), self._first[shard] + start
        first, last = np.searchsorted(selected, [start, stop]).tolist()
        return selected[first:last], self._first[shard] + first

    def rows(self, shard: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Row numbers in the shard of positions [start, stop), which lie in that shard."""
        first = self._first[shard]
        selected = self._selected[shard]
        return np.arange(start - first, stop - first) if selected is None else selected[start - first : stop - first]


@dataclass(frozen=True, slots=True)
class Part:
    """Positions [start, stop) of one shard, in a file of their own."""

    index: int
    shard: int
    start: int
    stop: int

    @property
    def name(self) -> str:
        return f"part-{self.index:05d}.parquet"

    @property
    def num_rows(self) -> int:
        return self.stop - self.start


class PartMap:
    """The parts in order: each shard is cut into ranges of rows_per_part of the rows that are answered."""

    def __init__(self, rows: RowMap, rows_per_part: int) -> None:
        self.parts: list[Part] = []
        for shard in range(rows.num_shards):
            first, last = rows.shard_positions(shard)
            for start in range(first, last, rows_per_part):
                self.parts.append(Part(len(self.parts), shard, start, min(start + rows_per_part, last)))
        self._starts = [part.start for part in self.parts]

    def count_by_part(self, positions: Positions) -> npt.NDArray[np.int64]:
        """int64 [num_parts]: how many of the positions lie in each part."""
        of_part = np.searchsorted(self._starts, positions, side="right") - 1
        return np.bincount(of_part, minlength=len(self.parts))
