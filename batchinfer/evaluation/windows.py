"""How a text is cut to be scored. Used by scoring.py; no torch."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class WindowRules:
    """window: targets a window at most; each window starts afresh, with the last target of the one before as its first
    input. min_inputs: windows with fewer inputs are dropped. Raises ValueError naming the field and what is allowed."""

    window: int = 512
    min_inputs: int = 16

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window = {self.window}: must be 1 or more")
        if not 1 <= self.min_inputs <= self.window:
            raise ValueError(f"min_inputs = {self.min_inputs}: must be from 1 to the window ({self.window})")


def cut(texts: Iterable[TokenIds], rules: WindowRules) -> Iterator[TokenIds]:
    """Windows of each text alone: inputs and, one place on, their targets, so a window of n targets has n + 1 ids."""
    for ids in texts:
        for start in range(0, len(ids) - 1, rules.window):
            window = ids[start : start + rules.window + 1]
            if len(window) - 1 >= rules.min_inputs:
                yield window
