"""The techniques that `--confirm` measures, each with the job and the memory on which it shows. Called by
confirm.py."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from batchinfer.cache.spec import KVCacheSpec
from batchinfer.comparison.workloads import Workload, distinct_tokens, even_lengths, heavy_tail, shared_prefixes
from batchinfer.models.spec import DecoderSpec
from batchinfer.units import format_bytes

BLOCK_SIZE = 16
_STATIC_BATCH = 8  # as small as the longest completion of most batches stands far above its mean
_RESERVATIONS = 4
_EVEN_ROWS_IN_16_BITS = 8
_SMALL_BATCH = 4
Entry = Mapping[str, Any]  # of a variant, as compare() makes it


@dataclass(frozen=True, slots=True)
class OwnFigure:
    """What a technique is about, beside speed. value: of a variant's entry. text: of the value."""

    name: str
    value: Callable[[Entry], float]
    text: Callable[[float], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Technique:
    """without and applied: values of `option`. settings: of run's options, the same on both sides, but for `option`."""

    name: str
    option: str
    without: Any
    applied: Any
    workload: Workload
    settings: Mapping[str, Any]
    own_figure: OwnFigure


class _Memory:
    """--kv-cache-memory in closed form, in blocks of 16-bit KV."""

    def __init__(self, model: DecoderSpec, kv_dtype: str) -> None:
        self.kv_dtype = kv_dtype
        self._spec = KVCacheSpec(model.num_layers, model.num_kv_heads, model.head_dim, BLOCK_SIZE, kv_dtype, False)

    def of_blocks(self, num_blocks: int) -> dict[str, Any]:
        return {"kv_cache_memory": num_blocks * self._spec.bytes_per_block(), "kv_cache_dtype": self.kv_dtype}

    def of_rows(self, workload: Workload, num_rows: int) -> dict[str, Any]:
        """Room for that many of the longest row."""
        return self.of_blocks(num_rows * -(-workload.longest // BLOCK_SIZE))


def techniques(model: DecoderSpec, kv_dtype: str, models: tuple[str, str] | None) -> list[Technique]:
    """kv_dtype: the 16-bit KV format. models: paths with 16-bit and with quantised weights; without them the weights
    are not compared."""
    memory = _Memory(model, kv_dtype)
    tail, shared = heavy_tail(model.vocab_size), shared_prefixes(model.vocab_size)
    found = [_batching(tail, memory), _allocation(tail, memory), _caching(shared, memory), _order(shared, memory)]
    found.append(_kv_dtype(even_lengths(model.vocab_size, 60), memory))
    return found + ([_weights(even_lengths(model.vocab_size, 30), memory, models)] if models else [])


def _batching(workload: Workload, memory: _Memory) -> Technique:
    places = {"max_num_seqs": _STATIC_BATCH, **memory.of_rows(workload, _STATIC_BATCH)}
    return Technique(
        name="continuous batching, not static",
        option="batching",
        without="static",
        applied="continuous",
        workload=workload,
        settings={"order": "input", **places},
        own_figure=OwnFigure("places in use", _places_in_use(_STATIC_BATCH), "{:.0%}".format),
    )


def _allocation(workload: Workload, memory: _Memory) -> Technique:
    return Technique(
        name="paged KV, not contiguous",
        option="kv_allocation",
        without="contiguous",
        applied="paged",
        workload=workload,
        settings={"order": "input", **memory.of_rows(workload, _RESERVATIONS)},
        own_figure=OwnFigure("most sequences at once", lambda entry: entry["batch_size"]["peak"], "{:.0f}".format),
    )


def _caching(workload: Workload, memory: _Memory) -> Technique:
    return Technique(
        name="prefix caching",
        option="enable_prefix_caching",
        without=False,
        applied=True,
        workload=workload,
        settings=memory.of_rows(workload, len(workload.rows)),
        own_figure=OwnFigure("prompt tokens cached", _cached, "{:.0%}".format),
    )


def _order(workload: Workload, memory: _Memory) -> Technique:
    """In memory for a quarter of the job's distinct tokens."""
    return Technique(
        name="packed order, not the input's",
        option="order",
        without="input",
        applied="packed",
        workload=workload,
        settings=memory.of_blocks(-(-distinct_tokens(workload, BLOCK_SIZE) // (4 * BLOCK_SIZE))),
        own_figure=OwnFigure("prompt tokens cached", _cached, "{:.0%}".format),
    )


def _kv_dtype(workload: Workload, memory: _Memory) -> Technique:
    return Technique(
        name="fp8 KV, not 16-bit",
        option="kv_cache_dtype",
        without=memory.kv_dtype,
        applied="fp8",
        workload=workload,
        settings=memory.of_rows(workload, _EVEN_ROWS_IN_16_BITS),
        own_figure=OwnFigure("tokens held", _tokens_held, "{:,.0f}".format),
    )


def _weights(workload: Workload, memory: _Memory, models: tuple[str, str]) -> Technique:
    """On few sequences at once, where reading the weights takes the time."""
    return Technique(
        name="quantised weights, not 16-bit",
        option="model",
        without=models[0],
        applied=models[1],
        workload=workload,
        settings={"max_num_seqs": _SMALL_BATCH, **memory.of_rows(workload, _SMALL_BATCH)},
        own_figure=OwnFigure("peak memory", lambda entry: entry["peak_memory_bytes"], format_bytes),
    )


def _places_in_use(places: int) -> Callable[[Entry], float]:
    return lambda entry: entry["batch_size"]["mean"] / places


def _cached(entry: Entry) -> float:
    return entry["cached_prompt_tokens"] / entry["prompt_tokens"]


def _tokens_held(entry: Entry) -> float:
    return entry["kv_blocks"]["total"] * BLOCK_SIZE
