"""What a device's faults and lack of memory become. Used by the model runner."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from batchinfer.errors import BatchInferError
from batchinfer.scheduler_output import SchedulerOutput


class ForwardOutOfMemory(Exception):
    """A forward pass had no memory; a smaller one may have."""

    def __init__(self, cause: Exception) -> None:
        self.cause = cause


@contextmanager
def forward_errors() -> Iterator[None]:
    """Around a forward pass, which is repeatable, other than what follows it: it only writes KV."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if _is_out_of_memory(error):
            raise ForwardOutOfMemory(error.with_traceback(None)) from None  # its frames hold the activations
        raise


@contextmanager
def device_errors(step: SchedulerOutput | None) -> Iterator[None]:
    """Makes faults of the device and lack of memory errors that end the job with one line; others are bugs and stay.
    step: that runs; None: before the first."""
    try:
        yield
    except ForwardOutOfMemory as error:
        raise _out_of_memory(step, error.cause) from error.cause
    except (MemoryError, RuntimeError) as error:
        if _is_out_of_memory(error):
            raise _out_of_memory(step, error) from error
        if isinstance(error, torch.AcceleratorError):
            raise BatchInferError(f"the device failed in {_step(step)}: {_first_line(error)}") from error
        raise


def _out_of_memory(step: SchedulerOutput | None, error: Exception) -> BatchInferError:
    return BatchInferError(
        f"out of memory in {_step(step)} ({_first_line(error)}): lower --max-num-batched-tokens, --max-num-seqs or "
        "--kv-cache-memory"
    )


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)


def _step(step: SchedulerOutput | None) -> str:
    if step is None:
        return "the steps that make it ready"
    return f"a step of {step.num_tokens} tokens in {len(step.slots)} sequences"


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
