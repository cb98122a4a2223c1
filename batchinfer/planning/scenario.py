"""One way to run a job: options, cache and weights, with what it comes to. Made by plan.py for the options as they are,
and by advice.py for changed ones."""

from dataclasses import dataclass, replace
from typing import Any

from batchinfer.cache.spec import KVCacheSpec
from batchinfer.config import JobConfig
from batchinfer.errors import UsageError
from batchinfer.executors.cache_size import CacheSize, size_cache
from batchinfer.executors.device_profile import profile_key
from batchinfer.planning.forecast import JobShape
from batchinfer.planning.model_facts import ModelFacts
from batchinfer.planning.simulation import CacheBlocks
from batchinfer.planning.step_cost import CalibratedCost, RooflineCost, StepCost
from batchinfer.planning.step_trace import Forecast
from batchinfer.roofline import DevicePeaks, load_step_times


@dataclass(frozen=True, slots=True)
class Scenario:
    """config and model: under which the job runs. cache, size: what its KV cache is like. has_own_weights: the weights
    are the checkpoint's, so that steps timed with it tell of it."""

    config: JobConfig
    model: ModelFacts
    cache: KVCacheSpec
    size: CacheSize
    has_own_weights: bool = True

    @classmethod
    def make(cls, config: JobConfig, model: ModelFacts) -> "Scenario":
        """Raises UsageError as a run does where sizes do not fit, and where the device's memory is not known."""
        free_bytes = model.free_bytes
        if free_bytes is None and config.cache.kv_cache_memory is None:
            raise UsageError("--device cuda: there is no GPU here to ask for its memory; give --kv-cache-memory SIZE")
        cache = model.cache_spec(config)
        sizes = (model.sizes.total, free_bytes or 0, model.device, model.scratch_bytes(config))
        size = size_cache(config, model.spec, cache, *sizes)
        return cls(config, model, cache, size)

    @property
    def blocks(self) -> CacheBlocks:
        cache = self.config.cache
        return CacheBlocks(self.size.num_blocks, cache.block_size, cache.enable_prefix_caching)

    def with_weights(self, share: float) -> "Scenario":
        """With layers' projections of that share of their bytes; the memory that they leave goes to the cache."""
        sizes = self.model.sizes
        linear = int(sizes.linear * share)
        smaller = replace(sizes, linear=linear, total=sizes.total - sizes.linear + linear)
        return replace(Scenario.make(self.config, replace(self.model, sizes=smaller)), has_own_weights=False)

    def exact(self, job: JobShape) -> Forecast | None:
        return job.exact(self.config, self.blocks, self.size.max_model_len)

    def flow(self, job: JobShape, is_rough: bool = False) -> Forecast:
        return job.flow(self.config, self.blocks, self.size.max_model_len, is_rough)

    @property
    def profile_key(self) -> dict[str, Any]:
        """What steps that tell of its time were timed under."""
        model = self.model
        return profile_key(self.config, model.files, model.device, model.dtype, self.cache.dtype)

    def costs(self, peaks: DevicePeaks | None) -> dict[str, StepCost]:
        """The ways in which the time of its steps is known, the best one first."""
        model, found = self.model, dict[str, StepCost]()
        if self.has_own_weights and (times := load_step_times(self.profile_key)) is not None:
            found["calibrated"] = CalibratedCost(times)
        if peaks is not None:
            work = model.step_work(self.cache)
            found["roofline"] = RooflineCost(peaks, work, model.sizes.head, model.spec.num_layers)
        return found
