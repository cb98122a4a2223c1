"""GPTQ of one decoder layer: each linear module meets the inputs that the modules before it, already quantised, give.
Called by quantize_job."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from batchinfer.conversion.calibration_batch import CalibrationBatch
from batchinfer.conversion.layer_run import DTYPE, LayerRun
from batchinfer.conversion.layer_tensors import LayerTensors, Modules
from batchinfer.kernels.quantized_linear.stored import IntegerWeight
from batchinfer.quantization.calibrate_moments import InputMoments
from batchinfer.quantization.gptq_solve import GptqOptions, gptq
from batchinfer.quantization.rounding import Grid


def gptq_layer(
    run: LayerRun,
    layer: LayerTensors,
    modules: Modules,
    hidden: Tensor,
    batches: Sequence[CalibrationBatch],
    grid: Grid,
    options: GptqOptions,
) -> Iterator[tuple[str, IntegerWeight]]:
    """The layer's quantised weights by module, in order. hidden: bf16 [num_tokens, hidden_size], the layer's input;
    afterwards its output with the quantised weights."""

    def solve(names: Sequence[str], moments: InputMoments) -> Iterator[tuple[str, IntegerWeight]]:
        products = moments.products
        for name in names:
            made = gptq(layer.weights[name], products, grid.of(len(products)), options)
            layer.weights[name] = made.dequantize()
            yield name, made

    moments = InputMoments(hidden.shape[1])
    for batch in batches:
        moments.add(run.attention_input(hidden[batch.rows], layer))
    yield from solve([modules.q, modules.k, modules.v], moments)

    weights = layer.weights
    inner = torch.empty(len(hidden), weights[modules.output].shape[1], dtype=DTYPE)
    moments = InputMoments(inner.shape[1])
    for batch in batches:
        x = run.attention_input(hidden[batch.rows], layer)
        inner[batch.rows] = run.attend(x, batch, layer, [weights[name] for name in (modules.q, modules.k, modules.v)])
        moments.add(inner[batch.rows])
    yield from solve([modules.output], moments)

    moments = InputMoments(hidden.shape[1])
    for batch in batches:
        hidden[batch.rows] += run.project(inner[batch.rows], layer, weights[modules.output])
        moments.add(run.mlp_input(hidden[batch.rows], layer))
    yield from solve([modules.gate, modules.up], moments)

    inner = torch.empty(len(hidden), weights[modules.down].shape[1], dtype=DTYPE)
    moments = InputMoments(inner.shape[1])
    for batch in batches:
        x = run.mlp_input(hidden[batch.rows], layer)
        inner[batch.rows] = run.activate(x, layer, [weights[modules.gate], weights[modules.up]])
        moments.add(inner[batch.rows])
    yield from solve([modules.down], moments)
    for batch in batches:
        hidden[batch.rows] += run.descend(inner[batch.rows], layer, weights[modules.down])
