"""One layer by any method: its new tensors by their names in the file, and the calibration's hidden states carried on.
Called by quantize_job for each layer."""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from batchinfer.conversion.awq_layer import AwqLayer
from batchinfer.conversion.calibration_batch import CalibrationBatch
from batchinfer.conversion.gptq_layer import gptq_layer
from batchinfer.conversion.layer_run import LayerRun
from batchinfer.conversion.layer_tensors import LayerTensors, Modules
from batchinfer.conversion.options import QuantizeOptions
from batchinfer.errors import BatchInferError
from batchinfer.kernels.common.fp8 import STORAGE_MAX
from batchinfer.kernels.quantized_linear.stored import Fp8Weight, IntegerWeight
from batchinfer.models.families.common import WeightNames
from batchinfer.models.spec import DecoderSpec
from batchinfer.quantization.gptq_solve import GptqOptions
from batchinfer.quantization.rounding import Grid, round_to_fp8, round_to_nearest, storable
from batchinfer.quantization.write_awq import awq_tensors
from batchinfer.quantization.write_compressed import fp8_tensors, kv_scale_tensors, packed_tensors
from batchinfer.quantization.write_gptq import LOWEST_ZERO, gptq_tensors


class LayerMethod:
    """batches: of the calibration, none where the method needs none. scale_dtype: of scales in compressed-tensors
    files, which is the model's."""

    def __init__(
        self,
        options: QuantizeOptions,
        spec: DecoderSpec,
        names: WeightNames,
        batches: Sequence[CalibrationBatch],
        scale_dtype: torch.dtype,
    ) -> None:
        self._options = options
        self._spec = spec
        self._names = names
        self._modules = Modules.of(names)
        self._batches = batches
        self._scale_dtype = scale_dtype
        self._most_blocks = max((batch.num_blocks for batch in batches), default=0)
        lowest_zero = LOWEST_ZERO if options.written_format == "gptq" else 0
        self._grid = Grid(options.written_bits, options.group_size, options.is_symmetric, lowest_zero)

    @torch.inference_mode()
    def quantize(
        self, index: int, layer: LayerTensors, hidden: Tensor | None, advance: Callable[[], None]
    ) -> dict[str, Tensor]:
        """The layer's tensors by their full names. hidden: bf16 [num_tokens, hidden_size], changed to the layer's
        output. advance: called after each module. Raises BatchInferError naming the layer where its numbers are not
        finite or cannot be solved for."""
        try:
            return self._quantized(index, layer, hidden, advance)
        except BatchInferError as error:
            raise BatchInferError(f"{layer.prefix.rstrip('.')}: {error}") from error

    def _quantized(
        self, index: int, layer: LayerTensors, hidden: Tensor | None, advance: Callable[[], None]
    ) -> dict[str, Tensor]:
        tensors = {layer.prefix + name: tensor for name, tensor in layer.others.items()}
        run = LayerRun(self._spec, self._names, index, self._most_blocks) if hidden is not None else None
        before = hidden.clone() if hidden is not None and self._options.kv_cache_scales else None
        for module, made in self._made(run, layer, hidden):
            tensors |= {f"{layer.prefix}{module}.{name}": tensor for name, tensor in self._written(made).items()}
            advance()
        if run is not None and before is not None:  # AWQ has scaled the values by now
            tensors |= self._kv_scales(run, layer, before)
        return tensors | {layer.prefix + name: tensor for name, tensor in layer.others.items()}  # some are changed

    def _made(
        self, run: LayerRun | None, layer: LayerTensors, hidden: Tensor | None
    ) -> Iterator[tuple[str, IntegerWeight | Fp8Weight]]:
        options = self._options
        if run is not None and hidden is not None:
            search = _leading(self._batches, options.search_tokens)
            if options.method == "awq":
                yield from AwqLayer(run, layer, self._names, self._batches, search, self._grid).quantize(hidden)
                return
            if options.method == "awq-gptq":
                AwqLayer(run, layer, self._names, self._batches, search, self._grid).scale(hidden.clone())
            if options.uses_gptq:
                solver = GptqOptions(options.damp, options.act_order)
                yield from gptq_layer(run, layer, self._modules, hidden, self._batches, self._grid, solver)
                return
        for module in self._modules:
            weight = layer.weights[module]
            is_fp8 = options.method == "fp8"
            made = round_to_fp8(weight) if is_fp8 else round_to_nearest(weight, self._grid.of(weight.shape[1]))
            layer.weights[module] = made.dequantize()
            yield module, made
        if run is not None and hidden is not None:
            self._carry_on(run, layer, hidden)

    def _written(self, made: IntegerWeight | Fp8Weight) -> dict[str, Tensor]:
        if isinstance(made, Fp8Weight):
            return fp8_tensors(made, self._scale_dtype)
        if self._options.written_format == "awq":
            return awq_tensors(made)
        if self._options.written_format == "gptq":
            return gptq_tensors(made)
        return packed_tensors(made, self._options.is_symmetric, self._scale_dtype)

    def _carry_on(self, run: LayerRun, layer: LayerTensors, hidden: Tensor) -> None:
        for batch in self._batches:
            attended = self._attend(run, layer, hidden, batch)
            hidden[batch.rows] += run.project(attended, layer, layer.weights[self._modules.output])
            gate_up = [layer.weights[self._modules.gate], layer.weights[self._modules.up]]
            activated = run.activate(run.mlp_input(hidden[batch.rows], layer), layer, gate_up)
            hidden[batch.rows] += run.descend(activated, layer, layer.weights[self._modules.down])

    def _attend(self, run: LayerRun, layer: LayerTensors, hidden: Tensor, batch: CalibrationBatch) -> Tensor:
        qkv = [layer.weights[name] for name in (self._modules.q, self._modules.k, self._modules.v)]
        return run.attend(run.attention_input(hidden[batch.rows], layer), batch, layer, qkv)

    def _kv_scales(self, run: LayerRun, layer: LayerTensors, hidden: Tensor) -> dict[str, Tensor]:
        """With which the largest key and value of the calibration, as the layer makes them once it is quantised, are
        e4m3's largest number."""
        largest = [0.0, 0.0]
        for batch in self._batches:
            self._attend(run, layer, hidden, batch)
            found = run.largest_stored(batch)
            if not all(map(math.isfinite, found)):
                raise BatchInferError("its keys or values are NaN or infinite on the calibration text")
            largest = [max(a, b) for a, b in zip(largest, found, strict=True)]
        limit = STORAGE_MAX[torch.float8_e4m3fn]
        key_scale, value_scale = storable(torch.tensor(largest) / limit).tolist()
        attention = layer.prefix + self._modules.q.rpartition(".")[0] + "."
        return kv_scale_tensors(attention, key_scale, value_scale, self._scale_dtype)


def _leading(batches: Sequence[CalibrationBatch], num_tokens: int) -> int:
    """How many batches, from the first on, hold that many tokens; all where they hold fewer."""
    seen = 0
    for number, batch in enumerate(batches, 1):
        seen += batch.num_tokens
        if seen >= num_tokens:
            return number
    return len(batches)
