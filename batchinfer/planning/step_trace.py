"""The steps of a job as numbers: what each computes, reads and holds. Made by simulation.py and fluid.py, priced by
step_cost.py."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One entry a step, or for a run of `repeats` steps that are alike, as means over the run."""

    repeats: FloatArray
    sequences: FloatArray
    tokens: FloatArray  # computed
    samples: FloatArray  # tokens sampled
    cache_tokens: FloatArray  # that attention reads, over the sequences; a mean over layers, as windows hide some
    pairs: FloatArray  # of a query and a key that it sees, over the sequences; a mean over layers
    used_blocks: FloatArray

    @property
    def steps(self) -> float:
        return float(self.repeats.sum())

    @property
    def mean_sequences(self) -> float:
        return float(self.sequences @ self.repeats) / max(1.0, self.steps)

    @property
    def peak_sequences(self) -> int:
        return round(float(self.sequences.max(initial=0)))

    @property
    def peak_blocks(self) -> int:
        return round(float(self.used_blocks.max(initial=0)))


@dataclass(frozen=True, slots=True)
class Forecast:
    """A job's steps, and what the scheduler did beside them. is_exact: by the real scheduler, step by step."""

    trace: StepTrace
    preemptions: int
    recomputed_tokens: int  # whose KV a preemption threw away
    cached_tokens: int  # of prompts, served by the prefix cache
    output_tokens: int
    is_exact: bool
