"""AWQ of one decoder layer: scales that move precision to the inputs that matter, folded into the module before, then
the ranges of groups. Called by quantize_job."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from batchinfer.conversion.calibration_batch import CalibrationBatch
from batchinfer.conversion.layer_run import DTYPE, LayerRun
from batchinfer.conversion.layer_tensors import LayerTensors, Modules
from batchinfer.kernels.quantized_linear.stored import IntegerWeight
from batchinfer.models.families.common import WeightNames
from batchinfer.quantization.awq_search import search_range, search_scales
from batchinfer.quantization.calibrate_moments import InputMoments
from batchinfer.quantization.rounding import Grid, round_to_nearest


@dataclass(slots=True)
class _Seen:
    """What the search needs of the batches it uses: inputs and outputs of the blocks, a tensor a batch."""

    attention_in: list[Tensor]
    attention_out: list[Tensor]
    attended: list[Tensor]
    mlp_in: list[Tensor]
    mlp_out: list[Tensor]
    activated: list[Tensor]


class AwqLayer:
    """One layer's search. num_search_batches: how many of the batches, from the first on, losses are taken over;
    moments are taken over all."""

    def __init__(
        self,
        run: LayerRun,
        layer: LayerTensors,
        names: WeightNames,
        batches: Sequence[CalibrationBatch],
        num_search_batches: int,
        grid: Grid,
    ) -> None:
        self._run = run
        self._layer = layer
        self._names = names
        self._modules = Modules.of(names)
        self._batches = batches
        self._num_search_batches = num_search_batches
        self._grid = grid
        self._seen = _Seen([], [], [], [], [], [])
        self._scales: dict[str, Tensor] = {}
        weights = layer.weights
        self._moments = {
            name: InputMoments(weights[name].shape[1], grid.of(weights[name].shape[1]).group_size)
            for name in (self._modules.q, self._modules.output, self._modules.gate, self._modules.down)
        }

    def quantize(self, hidden: Tensor) -> Iterator[tuple[str, IntegerWeight]]:
        """The quantised weights by module, in order; the layer's norms and biases are changed to suit. hidden: bf16
        [num_tokens, hidden_size], the layer's input; afterwards its output with the weights as they were."""
        m = self._modules
        self.scale(hidden)
        for name in m:
            weight = self._layer.weights[name]
            # Cutting the weights that make queries and keys costs more in the softmax than in their own output.
            grid = self._grid.of(weight.shape[1])
            limits = None if name in (m.q, m.k) else search_range(weight, self._products(name), grid)
            made = round_to_nearest(weight, grid, limits)
            self._layer.weights[name] = made.dequantize()
            yield name, made

    def scale(self, hidden: Tensor) -> None:
        """The first half: scales the layer's weights and norms in place, and rounds nothing. hidden: as in quantize."""
        self._observe(hidden)
        self._scale_attention()
        self._scale_mlp()

    def _observe(self, hidden: Tensor) -> None:
        """Runs the layer as it is, and keeps what the search needs."""
        run, layer, m, seen = self._run, self._layer, self._modules, self._seen
        for number, batch in enumerate(self._batches):
            x = run.attention_input(hidden[batch.rows], layer)
            attended = run.attend(x, batch, layer, self._weights(m.q, m.k, m.v))
            attention_out = run.project(attended, layer, layer.weights[m.output])
            hidden[batch.rows] += attention_out
            y = run.mlp_input(hidden[batch.rows], layer)
            activated = run.activate(y, layer, self._weights(m.gate, m.up))
            mlp_out = run.descend(activated, layer, layer.weights[m.down])
            hidden[batch.rows] += mlp_out
            for name, inputs in ((m.q, x), (m.output, attended), (m.gate, y), (m.down, activated)):
                self._moments[name].add(inputs)
            if number < self._num_search_batches:
                seen.attention_in.append(x)
                seen.attention_out.append(attention_out)
                seen.attended.append(attended)
                seen.mlp_in.append(y)
                seen.mlp_out.append(mlp_out)
                seen.activated.append(activated)

    def _scale_attention(self) -> None:
        m, weights = self._modules, self._layer.weights
        found = self._search((m.q, m.k, m.v), self._attention_loss)
        self._multiply((m.q, m.k, m.v), self._fold_into_norm(self._names.input_norm, found))
        if weights[m.v].shape == weights[m.output].shape:  # with shared value heads no scale of an input has one source
            found = self._search((m.output,), lambda tried: self._linear_loss(m.output, self._seen.attended, tried[0]))
            self._divide_rows(m.v, found)
            self._multiply((m.output,), found)

    def _scale_mlp(self) -> None:
        m = self._modules
        found = self._search((m.gate, m.up), self._mlp_loss)
        self._multiply((m.gate, m.up), self._fold_into_norm(self._names.post_attention_norm, found))
        found = self._search((m.down,), lambda tried: self._linear_loss(m.down, self._seen.activated, tried[0]))
        self._divide_rows(m.up, found)
        self._multiply((m.down,), found)

    def _search(self, names: Sequence[str], loss: Callable[[Sequence[Tensor]], float]) -> Tensor:
        magnitudes = self._moments[names[0]].mean_magnitudes
        return search_scales(magnitudes, self._weights(*names), self._grid.of(len(magnitudes)), loss).scales

    def _attention_loss(self, tried: Sequence[Tensor]) -> float:
        """Squared error of the attention's output, its output projection included."""
        total = 0.0
        output = self._layer.weights[self._modules.output]
        for batch, x, wanted in zip(self._batches, self._seen.attention_in, self._seen.attention_out, strict=False):
            attended = self._run.attend(x, batch, self._layer, tried)
            total += _squared_error(self._run.project(attended, self._layer, output), wanted)
        return total

    def _mlp_loss(self, tried: Sequence[Tensor]) -> float:
        total = 0.0
        down = self._layer.weights[self._modules.down]
        for x, wanted in zip(self._seen.mlp_in, self._seen.mlp_out, strict=True):
            activated = self._run.activate(x, self._layer, tried)
            total += _squared_error(self._run.descend(activated, self._layer, down), wanted)
        return total

    def _linear_loss(self, name: str, inputs: Sequence[Tensor], tried: Tensor) -> float:
        error = (tried - self._layer.weights[name]).to(DTYPE)
        return sum(float(F.linear(x, error).to(torch.float32).square_().sum()) for x in inputs)

    def _fold_into_norm(self, norm: str, scales: Tensor) -> Tensor:
        """Divides the norm's weight. Returns by how much it came out divided."""
        self._layer.others[norm], exact = divided(self._layer.others[norm], scales)
        return exact

    def _divide_rows(self, name: str, scales: Tensor) -> None:
        """Divides what module `name` puts out; its bias is rounded to the checkpoint's precision."""
        self._layer.weights[name] = self._layer.weights[name] / scales[:, None]
        if (bias := self._layer.others.get(f"{name}.bias")) is not None:
            self._layer.others[f"{name}.bias"] = (bias.to(torch.float32) / scales).to(bias.dtype)

    def _multiply(self, names: Sequence[str], scales: Tensor) -> None:
        """Multiplies the columns of modules whose inputs come out divided."""
        for name in names:
            self._layer.weights[name] = self._layer.weights[name] * scales
            self._scales[name] = scales

    def _products(self, name: str) -> Tensor:
        """Products of the module's inputs as they are now."""
        products = self._moments[self._source_of(name)].products
        if name not in self._scales:
            return products
        scales = self._scales[name].unflatten(0, products.shape[:2])
        return products / (scales[:, :, None] * scales[:, None, :])

    def _source_of(self, name: str) -> str:
        """The module under whose name the inputs of this one were observed."""
        m = self._modules
        return {m.k: m.q, m.v: m.q, m.up: m.gate}.get(name, name)

    def _weights(self, *names: str) -> list[Tensor]:
        return [self._layer.weights[name] for name in names]


def divided(weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """A norm's weight [K] divided by scales, float32 [K], in its own precision; and by how much it came out divided,
    rounded as it is, so that nothing is lost there. Elements stay as they are where that precision cannot hold the
    quotient."""
    quotient = (weight.to(torch.float32) / scales).to(weight.dtype)
    exact = weight.to(torch.float32) / quotient.to(torch.float32)
    is_held = (exact > 0) & exact.isfinite()
    return torch.where(is_held, quotient, weight), torch.where(is_held, exact, 1.0)


def _squared_error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).to(torch.float32).square_().sum())
