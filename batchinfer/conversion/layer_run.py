"""The stages of one decoder layer over calibration batches, each with weights of the caller's choice, so that a method
can look at the inputs of every linear module and go on with what it made of it. Stages are those of models/decoder."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from batchinfer.cache.paged_kv import PagedKVCache
from batchinfer.cache.spec import KVCacheSpec
from batchinfer.conversion.calibration_batch import BLOCK_SIZE, CalibrationBatch
from batchinfer.conversion.layer_tensors import LayerTensors, Modules
from batchinfer.kernels.rms_norm import rms_norm
from batchinfer.models.attention import Attention
from batchinfer.models.families.common import WeightNames
from batchinfer.models.linear import Linear
from batchinfer.models.mlp import GatedMLP
from batchinfer.models.spec import DecoderSpec

DTYPE = torch.bfloat16  # of activations, whatever the checkpoint's: its range suits every model


class _AsItIs:
    """In the place of a module's last projection: shows that projection's input."""

    nbytes = 0

    def __call__(self, x: Tensor) -> Tensor:
        return x

    def fill(self, out: Tensor, x: Tensor) -> None:
        out.copy_(x)


class LayerRun:
    """Runs layer `index`. Weights come as float32 and are rounded to bf16 here."""

    def __init__(self, spec: DecoderSpec, names: WeightNames, index: int, most_blocks: int) -> None:
        self._spec = replace(spec, num_layers=1, sliding_windows=(spec.sliding_windows[index],))
        self._names = names
        self._modules = Modules.of(names)
        kv_spec = KVCacheSpec(1, spec.num_kv_heads, spec.head_dim, BLOCK_SIZE, "bf16", per_token_scales=False)
        self.cache = PagedKVCache(kv_spec, most_blocks)

    def attention_input(self, hidden: Tensor, layer: LayerTensors) -> Tensor:
        return self._norm(hidden, layer.others[self._names.input_norm])

    def mlp_input(self, hidden: Tensor, layer: LayerTensors) -> Tensor:
        return self._norm(hidden, layer.others[self._names.post_attention_norm])

    def attend(self, x: Tensor, batch: CalibrationBatch, layer: LayerTensors, weights: Sequence[Tensor]) -> Tensor:
        """x: attention_input's; weights: of q, k and v. The input of the output projection, [num_tokens, q_size]; keys
        and values lie in `cache` afterwards."""
        modules = self._modules
        qkv = self._linear([modules.q, modules.k, modules.v], layer, weights)
        q_norm = k_norm = None
        if self._spec.qk_norm:
            q_norm, k_norm = (layer.others[name].to(DTYPE) for name in (self._names.q_norm, self._names.k_norm))
        attention = Attention(self._spec, 0, qkv, _AsItIs(), q_norm, k_norm)
        q = attention.store(attention.project(x), batch, batch.rotation, self.cache)
        return attention.attend(q, batch, self.cache)

    def project(self, attended: Tensor, layer: LayerTensors, weight: Tensor) -> Tensor:
        return self._linear([self._modules.output], layer, [weight])(attended)

    def activate(self, x: Tensor, layer: LayerTensors, weights: Sequence[Tensor]) -> Tensor:
        """x: mlp_input's; weights: of gate and up. The input of the down projection, [num_tokens, intermediate_size]"""
        gate_up = self._linear([self._modules.gate, self._modules.up], layer, weights)
        return GatedMLP(gate_up, _AsItIs(), self._spec.activation)(x)

    def descend(self, activated: Tensor, layer: LayerTensors, weight: Tensor) -> Tensor:
        return self._linear([self._modules.down], layer, [weight])(activated)

    def largest_stored(self, batch: CalibrationBatch) -> tuple[float, float]:
        """The largest magnitudes among the keys and the values that attending to `batch` left in the cache."""
        blocks, places = batch.slot_mapping // BLOCK_SIZE, batch.slot_mapping % BLOCK_SIZE
        keys, values = self.cache.key(0)[blocks, :, places], self.cache.value(0)[blocks, :, places]
        return float(keys.abs().max()), float(values.abs().max())

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(hidden, weight.to(DTYPE), self._spec.rms_norm_eps)

    def _linear(self, modules: Sequence[str], layer: LayerTensors, weights: Sequence[Tensor]) -> Linear:
        biases = [layer.others[f"{module}.bias"] for module in modules if f"{module}.bias" in layer.others]
        stacked = torch.cat([weight.to(DTYPE) for weight in weights])
        return Linear(stacked, torch.cat(biases).to(DTYPE) if biases else None)
