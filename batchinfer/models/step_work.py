"""What a step of a decoder reads and computes at least, for each thing it can be counted by. Made by executors/local,
kept in a run's figures, held against the device's peaks by report/."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from batchinfer.cache.spec import KVCacheSpec
from batchinfer.models.spec import DecoderSpec

if TYPE_CHECKING:
    from batchinfer.models.decoder import Decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """Bytes and floating-point operations, a product and its sum counting as two.

    weight_bytes: read once a step. kv_bytes_per_token: keys and values of a cached token in all layers, scales
    included. linear_flops_per_token: of the projections that each computed token passes: all but the last layer's from
    attention on. logits_flops_per_token: of those and the head, for each token that is sampled or scored.
    attention_flops_per_pair: of a query and a key that it sees, in all layers, though the last has fewer. dtype: of
    weights and activations, unless the options ask for integers.
    """

    weight_bytes: int
    kv_bytes_per_token: int
    linear_flops_per_token: int
    logits_flops_per_token: int
    attention_flops_per_pair: int
    dtype: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def step_work(decoder: "Decoder", cache: KVCacheSpec) -> StepWork:
    """For a loaded decoder and the cache that it runs with."""
    return expected_work(decoder.spec, decoder.step_weight_bytes, cache)


def expected_work(spec: DecoderSpec, weight_bytes: int, cache: KVCacheSpec) -> StepWork:
    """For a model that need not be there."""
    after_keys = 2 * (_output_parameters(spec) + _mlp_parameters(spec))  # operations a layer
    return StepWork(
        weight_bytes=weight_bytes,
        kv_bytes_per_token=cache.bytes_per_token(),
        linear_flops_per_token=2 * linear_parameters(spec) - after_keys,
        logits_flops_per_token=2 * spec.hidden_size * spec.vocab_size + after_keys,
        attention_flops_per_pair=4 * spec.num_layers * spec.num_q_heads * spec.head_dim,
        dtype=cache.wide_dtype,
    )


def linear_parameters(spec: DecoderSpec) -> int:
    """Elements of all layers' projection matrices, the head's apart."""
    qkv = spec.hidden_size * spec.head_dim * (spec.num_q_heads + 2 * spec.num_kv_heads)
    return spec.num_layers * (qkv + _output_parameters(spec) + _mlp_parameters(spec))


def _output_parameters(spec: DecoderSpec) -> int:
    return spec.hidden_size * spec.head_dim * spec.num_q_heads


def _mlp_parameters(spec: DecoderSpec) -> int:
    return 3 * spec.hidden_size * spec.intermediate_size
