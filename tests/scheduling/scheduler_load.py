"""What the scheduler costs with many sequences, without a model: `python tests/scheduling/scheduler_load.py` prints the
milliseconds of a step under each load."""

import argparse
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchinfer.cache.block_pool import BlockPool
from batchinfer.config import SchedulerConfig
from batchinfer.request import Request, RequestId, SamplingParams
from batchinfer.scheduler_output import StepResult
from batchinfer.scheduling.scheduler import Scheduler
from batchinfer.sequence import Sequence

BLOCK_SIZE = 16
NUM_RUNNING = 1024
NUM_WAITING = 100_000
_DISTINCT = 12_000  # prompts; those behind them never start within a measurement
_MODEL_BUFFER = 1 << 25  # bytes written between steps, as a model would push everything out of the processor's caches


@dataclass(frozen=True, kw_only=True)
class Load:
    """prompt_tokens: from, to. mean_tokens: of answers, which end at each token with the same chance, so that 1,024
    running ones start and end at a steady rate; None: none ends. is_known: max_tokens is the answer's length, and
    nothing else ends it. num_blocks: of the cache. max_num_seqs: more than NUM_RUNNING where memory is what bounds."""

    prompt_tokens: tuple[int, int]
    mean_tokens: int | None = 100
    is_known: bool = False
    num_blocks: int = 68_000
    max_num_seqs: int = NUM_RUNNING
    shared_tokens: int = 0
    admission: str = "forecast"


LOADS = {
    "no starts": Load(prompt_tokens=(2, 2), mean_tokens=None),
    "short prompts": Load(prompt_tokens=(60, 140)),
    "long prompts": Load(prompt_tokens=(700, 800)),
    "shared beginnings": Load(prompt_tokens=(30, 100), shared_tokens=650),
    "tight memory": Load(prompt_tokens=(60, 140), num_blocks=14_000, max_num_seqs=4096),
    "tight, known": Load(prompt_tokens=(60, 140), num_blocks=14_000, max_num_seqs=4096, is_known=True),
    "tight, long": Load(prompt_tokens=(700, 800), num_blocks=56_000, max_num_seqs=4096),
    "tight, greedy": Load(prompt_tokens=(60, 140), num_blocks=13_500, max_num_seqs=4096, admission="greedy"),
}


@dataclass(frozen=True)
class Measured:
    """One entry a step."""

    milliseconds: npt.NDArray[np.float64]
    num_running: npt.NDArray[np.float64]
    num_started: npt.NDArray[np.float64]
    num_waiting: int  # at the end

    def line(self) -> str:
        ms = self.milliseconds
        return (
            f"{self.num_running.mean():6,.0f} running, {self.num_waiting:7,} waiting, {self.num_started.mean():5.1f} "
            f"started a step: mean {ms.mean():.3f} ms, p50 {np.median(ms):.3f}, p99 {np.percentile(ms, 99):.3f}, "
            f"most {ms.max():.3f}"
        )


class LoadedScheduler:
    """A scheduler under a load. step() runs a step and returns what schedule, commit and finishes took."""

    def __init__(self, load: Load, num_waiting: int = NUM_WAITING, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        config = SchedulerConfig(
            max_num_batched_tokens=16_384, max_num_seqs=load.max_num_seqs, admission=load.admission
        )
        self.scheduler = Scheduler(config, BlockPool(load.num_blocks, BLOCK_SIZE), max_model_len=2048)
        self._ends: dict[int, int] = {}
        self._next_token = 1 << 20  # of answers: no two are alike
        head = self._tokens(load.shared_tokens)
        prompts = [
            np.concatenate([head, self._tokens(int(self._rng.integers(*load.prompt_tokens, endpoint=True)))])
            for _ in range(min(_DISTINCT, num_waiting))
        ]
        for row in range(NUM_RUNNING + num_waiting):
            self._add(row, prompts[min(row, len(prompts) - 1)], load)

    def _tokens(self, count: int) -> npt.NDArray[np.int32]:
        return self._rng.integers(0, 40_000, count, np.int32)

    def _add(self, row: int, prompt: npt.NDArray[np.int32], load: Load) -> None:
        mean = load.mean_tokens
        self._ends[row] = length = 1000 if mean is None else min(1000, int(self._rng.geometric(1 / mean)))
        max_tokens = length if load.is_known else 1000
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=load.is_known or mean is None)
        self.scheduler.add(Sequence(Request(RequestId(0, row), prompt, params, max_tokens, 0), 0.0))

    def step(self) -> tuple[float, int, int]:
        """Milliseconds, sequences that ran and those that started."""
        start = time.perf_counter()
        output = self.scheduler.schedule()
        spent = time.perf_counter() - start
        assert output is not None
        count = len(output.slots)
        token_ids = np.arange(self._next_token, self._next_token + count, dtype=np.int32)
        self._next_token += count
        token_ids[~output.samples] = -1
        result = StepResult(output.step_id, token_ids, np.ones(count, np.bool_))
        np.zeros(_MODEL_BUFFER, np.uint8).fill(1)
        start = time.perf_counter()
        sampled = self.scheduler.commit(output, result).sampled
        spent += time.perf_counter() - start
        ends = self._ends
        ended = [sequence for sequence, _ in sampled if len(sequence.output_tokens) >= ends[sequence.request.id.row]]
        start = time.perf_counter()
        for sequence in ended:
            self.scheduler.finish(sequence, "stop")
        spent += time.perf_counter() - start
        return spent * 1e3, self.scheduler.num_running, len(output.started)


def measure(load: Load, num_steps: int, num_waiting: int = NUM_WAITING) -> Measured:
    """Steps in the steady state: after as many as the first prompts and the first endings take."""
    loaded = LoadedScheduler(load, num_waiting)
    for _ in range(150):
        loaded.step()
    columns = np.array([loaded.step() for _ in range(num_steps)]).T
    return Measured(*columns, loaded.scheduler.num_waiting)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("names", nargs="*", metavar="NAME", default=list(LOADS), help=", ".join(LOADS))
    arguments = parser.parse_args()
    for name in arguments.names:
        print(f"{name:18}{measure(LOADS[name], arguments.steps).line()}", flush=True)


if __name__ == "__main__":
    main()
