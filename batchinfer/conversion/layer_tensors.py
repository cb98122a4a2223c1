"""One decoder layer's tensors out of a checkpoint: the weights to quantise in float32, the rest as stored. Read by the
methods, which change them in place."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from batchinfer.errors import BatchInferError
from batchinfer.models.checkpoint import SafetensorsCheckpoint
from batchinfer.models.families.common import WeightNames
from batchinfer.models.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class Modules:
    """Names of a layer's linear modules within the layer, by what they do."""

    q: str
    k: str
    v: str
    output: str
    gate: str
    up: str
    down: str

    @classmethod
    def of(cls, names: WeightNames) -> "Modules":
        return cls(*names.qkv, names.attention_output, *names.gate_up, names.down)

    def __iter__(self) -> Iterator[str]:
        return iter((self.q, self.k, self.v, self.output, self.gate, self.up, self.down))


@dataclass(slots=True)
class LayerTensors:
    """weights: module name -> float32 [N, K]. others: the layer's other tensors by their name within the layer, in the
    checkpoint's own precision: norms, biases."""

    prefix: str
    weights: dict[str, Tensor]
    others: dict[str, Tensor]


def shapes(spec: DecoderSpec, modules: Modules) -> dict[str, tuple[int, int]]:
    """[N, K] of each linear module of a layer."""
    q_size, kv_size = spec.num_q_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    hidden, width = spec.hidden_size, spec.intermediate_size
    return {
        modules.q: (q_size, hidden),
        modules.k: (kv_size, hidden),
        modules.v: (kv_size, hidden),
        modules.output: (hidden, q_size),
        modules.gate: (width, hidden),
        modules.up: (width, hidden),
        modules.down: (hidden, width),
    }


def read_layer(source: SafetensorsCheckpoint, spec: DecoderSpec, names: WeightNames, index: int) -> LayerTensors:
    """Raises BatchInferError naming a tensor that is missing, or not the float matrix that the config promises."""
    prefix = names.layer.format(index)
    weights = {}
    for module, shape in shapes(spec, Modules.of(names)).items():
        name = f"{prefix}{module}.weight"
        if name not in source.names:
            raise BatchInferError(f"{source.where}: there is no tensor {name}")
        tensor = source.read(name)
        if tensor.shape != shape or not tensor.is_floating_point() or tensor.element_size() < 2:
            raise BatchInferError(
                f"{source.where}: tensor {name} is {tensor.dtype} {tuple(tensor.shape)}, not a 16 or 32-bit float of "
                f"{shape}"
            )
        if not torch.isfinite(tensor).all():
            raise BatchInferError(f"{source.where}: tensor {name} holds values that are not finite")
        weights[module] = tensor.to(torch.float32)
    taken = {f"{prefix}{module}.weight" for module in weights}
    others = {
        name.removeprefix(prefix): source.read(name).clone()
        for name in source.names
        if name.startswith(prefix) and name not in taken and not name.endswith(names.derived)
    }
    return LayerTensors(prefix, weights, others)
