"""What a forecast must know of the model and the device, found without loading a weight. Called by plan.py."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from batchinfer.cache.spec import ELEMENT_BYTES, KVCacheSpec
from batchinfer.config import JobConfig, ModelConfig
from batchinfer.data.tokenizer import Tokenizer
from batchinfer.errors import UsageError
from batchinfer.executors.step_memory import written_out_bytes
from batchinfer.models.loader import load_scheme, load_spec, own_dtype, quantization_config
from batchinfer.models.resolve import ModelFiles, resolve_model
from batchinfer.models.spec import DecoderSpec
from batchinfer.models.step_work import StepWork, expected_work
from batchinfer.planning.kv_forms import AttentionShape
from batchinfer.planning.model_size import StoredTensor, WeightForm, WeightSizes, dummy_heads, read_heads, weight_sizes


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """dtype: what --dtype stands for. method: of the weights' quantisation, "none" without. free_bytes: of the device's
    memory; None where there is no such device here to ask. static_kv_dtypes: of a cache that the checkpoint brings
    scales for."""

    files: ModelFiles
    spec: DecoderSpec
    tokenizer: Tokenizer
    dtype: str
    method: str
    sizes: WeightSizes
    device: str
    free_bytes: int | None
    static_kv_dtypes: tuple[str, ...]

    @property
    def attention(self) -> AttentionShape:
        return AttentionShape(self.spec.num_layers, self.spec.num_q_heads, self.spec.num_kv_heads, self.spec.head_dim)

    @property
    def layers_by_window(self) -> Mapping[int | None, int]:
        return Counter(self.spec.sliding_windows)

    def cache_spec(self, config: JobConfig) -> KVCacheSpec:
        """The cache that a run would have; --kv-guard strict may keep further layers in 16 bits. Raises UsageError."""
        kv_dtype = self.dtype if config.cache.kv_cache_dtype == "auto" else config.cache.kv_cache_dtype
        skipped, num_layers = config.cache.skip_layers, self.spec.num_layers
        if skipped and skipped[-1] >= num_layers:
            raise UsageError(f"--kv-cache-dtype-skip-layers {skipped[-1]}: the model has layers 0 to {num_layers - 1}")
        is_static = kv_dtype in self.static_kv_dtypes
        return KVCacheSpec(
            num_layers,
            self.spec.num_kv_heads,
            self.spec.head_dim,
            config.cache.block_size,
            kv_dtype,
            per_token_scales=ELEMENT_BYTES[kv_dtype] == 1 and not is_static,
            wide_layers=skipped,
            wide_dtype=self.dtype,
            static_scales=is_static,
        )

    def scratch_bytes(self, config: JobConfig) -> int:
        """As Decoder.scratch_bytes will be."""
        is_written_out = self.device == "cuda" and self.method != "none" and config.model.activation_dtype == "auto"
        return written_out_bytes(self.spec, self.dtype) if is_written_out else 0

    def step_work(self, cache: KVCacheSpec) -> StepWork:
        """As models/step_work.step_work has it of a loaded model."""
        return expected_work(self.spec, self.sizes.linear + self.sizes.head, cache)


def find_model(config: JobConfig, report: Callable[[str], None]) -> ModelFacts:
    """Finds or fetches the model's files and reads their heads. Errors as a run's."""
    from batchinfer.executors.local import load_tokenizer

    options = config.model
    files = resolve_model(options.model, report, options.quantization, options.load_format)
    spec = load_spec(files.path, options.allowed_config_fields)
    scheme = load_scheme(files.path, options.quantization)
    dtype = own_dtype(files.path, spec, scheme is not None) if options.dtype == "auto" else options.dtype
    device, free_bytes = _device(options)
    is_dummy = options.load_format == "dummy"
    tensors = dummy_heads(spec, scheme) if is_dummy else read_heads(files.path)
    activations, types = options.activation_dtype, getattr(scheme, "types", {})
    form = WeightForm(dtype, activations == "int8", _packs(dtype, device), types, activations == "fp8")
    return ModelFacts(
        files,
        spec,
        load_tokenizer(config, files.path, spec.vocab_size),
        dtype,
        "none" if scheme is None else scheme.method,
        weight_sizes(tensors, spec, form),
        device,
        free_bytes,
        _static_kv_dtypes(tensors, (quantization_config(files.path) or ({}, ""))[0]),
    )


def _device(options: ModelConfig) -> tuple[str, int | None]:
    """A GPU may be planned for where there is none."""
    from batchinfer.executors.local import available_memory, choose_device

    if options.device == "cpu":
        return "cpu", available_memory()
    import torch

    has_cuda = torch.cuda.is_available()
    if options.device == "cuda" and not has_cuda:
        return "cuda", None
    device = choose_device(options.device, has_cuda)
    return device, torch.cuda.mem_get_info()[0] if device == "cuda" else available_memory()


def _packs(dtype: str, device: str) -> bool:
    """Whether products of bf16 weights read a form of their own on this machine."""
    if dtype != "bf16" or device != "cpu":
        return False
    import torch

    from batchinfer.models.linear import PackedLinear

    return PackedLinear.is_best_for(torch.empty(1, 1, dtype=torch.bfloat16))


def _static_kv_dtypes(tensors: Mapping[str, StoredTensor], quantization: Mapping[str, Any]) -> tuple[str, ...]:
    """By the names of the scales; that their values are usable shows only at load."""
    from batchinfer.quantization.kv_scales import cache_dtypes, has_kv_scales

    return cache_dtypes(quantization) if has_kv_scales(tensors) else ()
