"""What a quantisation takes at most, in closed form. Shown by quantize_job before it starts."""

from dataclasses import dataclass

from batchinfer.conversion.options import QuantizeOptions
from batchinfer.models.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class MemoryForecast:
    """Bytes beside the interpreter and its libraries."""

    activation_bytes: int  # of the calibration tokens, bf16
    layer_bytes: int  # one layer's weights, float32
    working_bytes: int  # of the method, on the largest module

    @property
    def total_bytes(self) -> int:
        return self.activation_bytes + self.layer_bytes + self.working_bytes


def forecast(spec: DecoderSpec, options: QuantizeOptions, num_tokens: int) -> MemoryForecast:
    """With h the hidden size, a the width of all query heads, i the MLP's, n the calibration tokens, s those of the
    search, P one layer's weights, W its largest weight and k its most inputs:

    activations 2n(h + max(a, i)) for gptq; 2nh + 2s(4h + a + i) for awq; awq-gptq has both, one after the other, and
    another 2nh; 2nh for the rest if they calibrate; weights 4P; working 32k^2 + 16W with gptq (moments in float32,
    their factor in float64), 16W else.
    """
    h, inner = spec.hidden_size, spec.intermediate_size
    attended = spec.num_q_heads * spec.head_dim
    kv_size = spec.num_kv_heads * spec.head_dim
    parameters = h * (2 * attended + 2 * kv_size + 3 * inner)
    largest = h * max(attended, inner)
    tokens = num_tokens if options.needs_calibration else 0
    inputs = 2 * tokens * max(attended, inner) if options.uses_gptq else 0
    search = 2 * min(tokens, options.search_tokens) * (4 * h + attended + inner) if options.uses_awq else 0
    if options.method == "awq-gptq":
        search += 2 * tokens * h
    activations = 2 * tokens * h + max(inputs, search)
    working = 16 * largest + (32 * max(h, attended, inner) ** 2 if options.uses_gptq else 0)
    return MemoryForecast(activations, 4 * parameters, working)
