"""What a quantisation takes at most, in closed form. Shown by quantize_job before it starts."""

from dataclasses import dataclass

from batchinfer.conversion.calibration_batch import TOKENS_AT_ONCE
from batchinfer.conversion.checkpoint_files import WRITE_BYTES
from batchinfer.conversion.options import QuantizeOptions
from batchinfer.models.spec import DecoderSpec

_AT_WORK_BYTES = 96 << 20  # what libraries, once they work, take beyond what they took when they were loaded


@dataclass(frozen=True, slots=True)
class MemoryForecast:
    """Bytes beside the interpreter and its libraries."""

    activation_bytes: int  # of the calibration tokens, bf16
    batch_bytes: int  # of one batch of them on its way through a layer
    layer_bytes: int  # one layer's weights, float32
    working_bytes: int  # of the method, on the largest module
    writing_bytes: int  # of the finished checkpoint's largest tensor, when nothing else is left

    @property
    def total_bytes(self) -> int:
        layer = self.activation_bytes + self.batch_bytes + self.layer_bytes + self.working_bytes
        return max(layer, self.writing_bytes) + _AT_WORK_BYTES


def forecast(spec: DecoderSpec, options: QuantizeOptions, num_tokens: int) -> MemoryForecast:
    """With h the hidden size, a the width of all query heads, i the MLP's, k the most inputs of a module, V the
    vocabulary, n the calibration tokens, s those of the search, b those of a batch, g the group size, P one layer's
    weights and W its largest weight:

    activations 2n(h + k) for gptq; 2nh + 2s(4h + a + i) for awq; awq-gptq has both, one after the other, and another
    2nh; 2nh for the rest if they calibrate. A batch 16bk, weights 4P. Working 16W, for awq 24W and its moments
    4g(2h + a + i) + 12gk; with gptq also 40k^2 (moments in float32, their factor in float64). Writing 2Vh.
    """
    h, inner = spec.hidden_size, spec.intermediate_size
    attended = spec.num_q_heads * spec.head_dim
    most = max(h, attended, inner)
    parameters = h * (2 * attended + 2 * spec.num_kv_heads * spec.head_dim + 3 * inner)
    tokens = num_tokens if options.needs_calibration else 0
    inputs = 2 * tokens * most if options.uses_gptq else 0
    search = 2 * min(tokens, options.search_tokens) * (4 * h + attended + inner) if options.uses_awq else 0
    if options.method == "awq-gptq":
        search += 2 * tokens * h
    return MemoryForecast(
        activation_bytes=2 * tokens * h + max(inputs, search),
        batch_bytes=16 * min(tokens, max(TOKENS_AT_ONCE, options.calibration_length)) * most,
        layer_bytes=4 * parameters,
        working_bytes=_working_bytes(spec, options, attended, most),
        writing_bytes=2 * spec.vocab_size * h + WRITE_BYTES,
    )


def _working_bytes(spec: DecoderSpec, options: QuantizeOptions, attended: int, most: int) -> int:
    h, inner = spec.hidden_size, spec.intermediate_size
    largest = h * max(attended, inner)
    awq = 0
    if options.uses_awq:
        group = [options.group_size if options.group_size != -1 else width for width in (h, h, attended, inner)]
        moments = sum(4 * size * width for size, width in zip(group, (h, h, attended, inner), strict=True))
        awq = 24 * largest + moments + 12 * max(group) * most
    return max(16 * largest + 40 * most**2, awq) if options.uses_gptq else max(16 * largest, awq)
