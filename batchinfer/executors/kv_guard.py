"""Whether a job's first prompts bear an 8-bit KV cache: their logits against those of a cache in the model's own
precision, before the job runs; and which layers to keep in that precision where they do not. Called by the pipeline."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from batchinfer.cache.paged_kv import PagedKVCache
from batchinfer.cache.spec import KVCacheSpec
from batchinfer.data.feeder import Feeder
from batchinfer.engine import divergence
from batchinfer.engine.divergence import Divergence
from batchinfer.engine.whole_sequences import blocks_needed, pack, run_whole
from batchinfer.models.decoder import Decoder
from batchinfer.request import Request

KL_BOUND = 0.05  # nats, of the mean over the tokens
MOST_TOKENS = 512  # of each prompt: its first ones
_RANKING_TOKENS = 512  # of all prompts together, for the search for the worst layers
_TOKENS_A_PASS = 2048
TokenIds = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class GuardFigures:
    """Over all tokens compared. Some 1e38 where the 8-bit cache makes the numbers NaN."""

    kl_divergence: float  # nats, mean; the reference is the cache in the model's precision
    kl_divergence_max: float
    top1_agreement: float  # share of the tokens after which both hold the same one for the likeliest

    @classmethod
    def of(cls, found: Divergence) -> "GuardFigures":
        kl = np.nan_to_num(found.kl, nan=float(np.finfo(np.float32).max))  # infinity has no place in JSON
        return cls(float(kl.mean(dtype=np.float64)), float(kl.max()), found.top1_agreement)

    @property
    def is_within_bound(self) -> bool:
        return self.kl_divergence <= KL_BOUND

    def __str__(self) -> str:
        return (
            f"KL divergence {self.kl_divergence:.3g} nats in the mean, {self.kl_divergence_max:.3g} at most, top-1 "
            f"agreement {self.top1_agreement:.1%}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardOutcome:
    """What the guard found; stored in the output's metadata, and kept when a job carries on."""

    kv_cache_dtype: str
    rows: int
    tokens: int
    kl_bound: float
    before: GuardFigures  # of the cache that the options ask for
    wide_layers: tuple[int, ...]  # that a strict guard keeps in the model's precision beside those of the options
    after: GuardFigures  # of the cache that the job runs with

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "wide_layers": list(self.wide_layers)}

    def describe(self, wide_dtype: str) -> str:
        """One line for the log."""
        compared = (
            f"KV guard: {self.kv_cache_dtype} against {wide_dtype} KV on {self.tokens:,} tokens of {self.rows} rows"
        )
        if self.wide_layers:
            layers = ", ".join(map(str, self.wide_layers))
            return f"{compared}: {self.before}; with layers {layers} in {wide_dtype}: {self.after} (bound: {KL_BOUND})"
        if self.after.is_within_bound:
            return f"{compared}: {self.after} (bound: {KL_BOUND})"
        return (
            f"warning: {compared}: {self.after}, beyond the bound of {KL_BOUND}: the answers suffer; give "
            f"--kv-cache-dtype auto, or --kv-guard strict to keep the worst layers in {wide_dtype}"
        )


def wide_layers_of(outcome: Mapping[str, Any] | None) -> tuple[int, ...]:
    """The layers that an outcome's JSON names."""
    return tuple(outcome["wide_layers"]) if outcome else ()


def first_prompts(feeder: Feeder, num_rows: int) -> list[TokenIds]:
    """The first MOST_TOKENS token ids of the first rows that can run at all."""
    prompts: dict[tuple[int, int], TokenIds] = {}
    while len(prompts) < num_rows and not feeder.is_exhausted:
        for entry in feeder.take(wait=True):
            if isinstance(entry, Request):
                prompts[entry.id.shard, entry.id.row] = entry.prompt_token_ids[:MOST_TOKENS]
    return list(prompts.values())[:num_rows]


def guard_kv_cache(
    decoder: Decoder, spec: KVCacheSpec, prompts: Sequence[TokenIds], is_strict: bool, report: Callable[[str], None]
) -> GuardOutcome | None:
    """Compares the cache of `spec`; where is_strict and the bound ask for it, finds layers to keep in its wide_dtype
    instead. None where there is no prompt to compare, or the model's numbers are not finite in the wide_dtype either.
    """
    trial = _Trial(decoder, spec, prompts)
    if not trial.prompts:
        report("KV guard: there is no row to compare")
        return None
    before = after = trial.figures(())
    kept: tuple[int, ...] = ()
    if is_strict and not before.is_within_bound:
        report(f"KV guard: {before}, beyond the bound of {KL_BOUND}: looking for layers to keep in {spec.wide_dtype}")
        kept = _fewest_layers(trial)
        after = trial.figures(kept)
    outcome = GuardOutcome(
        kv_cache_dtype=spec.dtype,
        rows=len(trial.prompts),
        tokens=sum(map(len, trial.prompts)),
        kl_bound=KL_BOUND,
        before=before,
        wide_layers=kept,
        after=after,
    )
    report(outcome.describe(spec.wide_dtype))
    return outcome


def layers_by_harm(decoder: Decoder, spec: KVCacheSpec, prompts: Sequence[TokenIds]) -> list[tuple[float, int]]:
    """(mean KL divergence with only that layer in 8 bits, layer), the worst first. The prompts' beginnings do, as each
    layer takes a pass over them."""
    trial = _Trial(decoder, spec, [prompt[: max(1, _RANKING_TOKENS // len(prompts))] for prompt in prompts])
    harm = [(trial.figures(set(trial.narrow_layers) - {layer}).kl_divergence, layer) for layer in trial.narrow_layers]
    return sorted(harm, key=lambda entry: (-entry[0], entry[1]))


def _fewest_layers(trial: "_Trial") -> tuple[int, ...]:
    """The fewest of the worst layers that bring the figures within the bound, by bisection: with all of them wide there
    is no difference left."""
    order = [layer for _, layer in layers_by_harm(trial.decoder, trial.spec, trial.prompts)]
    too_few, enough = 0, len(order)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if trial.figures(order[:middle]).is_within_bound:
            enough = middle
        else:
            too_few = middle
    return tuple(sorted(order[:enough]))


class _Trial:
    """The prompts' hidden states with the cache in the model's precision, and comparisons with them. Prompts whose
    states are not finite are left out."""

    def __init__(self, decoder: Decoder, spec: KVCacheSpec, prompts: Sequence[TokenIds]) -> None:
        self.decoder = decoder
        self.spec = spec
        self.narrow_layers = [layer for layer in range(spec.num_layers) if layer not in spec.wide_layers]
        states = self._hidden_states(self.narrow_layers, prompts)
        finite = [row for row, hidden in enumerate(states) if bool(hidden.isfinite().all())]
        self.prompts = [prompts[row] for row in finite]
        self._reference = [states[row] for row in finite]

    def figures(self, wide_layers: Collection[int]) -> GuardFigures:
        """wide_layers: kept in the model's precision beside those of the spec."""
        pairs = zip(self._hidden_states(wide_layers, self.prompts), self._reference, strict=True)
        head = self.decoder
        return GuardFigures.of(divergence.join([divergence.compare(head, *pair) for pair in pairs]))

    def _hidden_states(self, wide_layers: Collection[int], prompts: Sequence[TokenIds]) -> list[Tensor]:
        """[num_tokens, hidden_size] of each prompt."""
        block_size = self.spec.block_size
        spec = replace(self.spec, wide_layers=tuple(sorted({*self.spec.wide_layers, *wide_layers})))
        passes = list(pack(prompts, _TOKENS_A_PASS))
        num_blocks = max((blocks_needed(some, block_size) for some in passes), default=1)
        cache = PagedKVCache(spec, num_blocks, self.decoder.device)
        states = [run_whole(self.decoder, cache, some, block_size) for some in passes]
        lengths = [[len(prompt) for prompt in some] for some in passes]
        return [part for hidden, some in zip(states, lengths, strict=True) for part in hidden.split(some)]
