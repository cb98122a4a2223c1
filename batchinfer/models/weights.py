"""Builds a Decoder out of named tensors, one layer at a time, so that beside the finished weights only one layer's
originals are in memory. Called by loader."""

from collections.abc import Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor

from batchinfer.errors import BatchInferError
from batchinfer.models.attention import Attention
from batchinfer.models.decoder import Decoder, DecoderLayer
from batchinfer.models.families.common import WeightNames
from batchinfer.models.linear import Int8Linear, Linear, Projection
from batchinfer.models.mlp import GatedMLP
from batchinfer.models.packed_linear import PackedLinear
from batchinfer.models.spec import DecoderSpec


class TensorSource(Protocol):
    """Named tensors, read when asked for."""

    @property
    def where(self) -> str:
        """For messages."""
        ...

    @property
    def names(self) -> Collection[str]: ...

    def read(self, name: str) -> Tensor: ...


def build_decoder(
    spec: DecoderSpec,
    source: TensorSource,
    dtype: torch.dtype,
    device: torch.device,
    activation_dtype: str = "auto",
    names: WeightNames | None = None,
) -> Decoder:
    """activation_dtype: one of config.ACTIVATION_DTYPES, what all products run in; the embedding and the norms keep
    `dtype`. Raises BatchInferError naming a parameter without a tensor, a tensor of another shape, or a tensor that no
    parameter takes."""
    return _Builder(spec, source, dtype, device, activation_dtype, names or WeightNames()).build()


class _Builder:
    def __init__(
        self,
        spec: DecoderSpec,
        source: TensorSource,
        dtype: torch.dtype,
        device: torch.device,
        activation_dtype: str,
        names: WeightNames,
    ) -> None:
        self._spec = spec
        self._source = source
        self._dtype = dtype
        self._device = device
        self._activation_dtype = activation_dtype
        self._names = names
        self._unused = {name for name in source.names if not name.endswith(names.derived)}
        self._num_parameters = 0
        self._weight_bytes = 0

    def build(self) -> Decoder:
        spec, names = self._spec, self._names
        embedding = self._stack([names.embedding], [spec.vocab_size], spec.hidden_size)
        layers = [self._layer(layer) for layer in range(spec.num_layers)]
        final_norm = self._vector(names.final_norm, spec.hidden_size)
        lm_head = self._projection(self._lm_head_weight(embedding), None, is_shared=spec.tie_word_embeddings)
        if self._unused:
            raise BatchInferError(f"{self._source.where}: tensor {min(self._unused)} has no place in this model")
        return Decoder(spec, embedding, layers, final_norm, lm_head, self._num_parameters, self._weight_bytes)

    def _lm_head_weight(self, embedding: Tensor) -> Tensor:
        name = self._names.lm_head
        if not self._spec.tie_word_embeddings:
            return self._stack([name], [self._spec.vocab_size], self._spec.hidden_size)
        if name in self._unused:  # some checkpoints store the tied tensor twice
            self._unused.discard(name)
            if not torch.equal(self._source.read(name).to(self._device, self._dtype), embedding):
                raise BatchInferError(
                    f"{self._source.where}: {name} differs from the embedding, but tie_word_embeddings is true"
                )
        return embedding

    def _layer(self, index: int) -> DecoderLayer:
        spec, names = self._spec, self._names
        prefix = names.layer.format(index)
        q_size, kv_size = spec.num_q_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        qkv = self._linear(prefix, names.qkv, [q_size, kv_size, kv_size], spec.hidden_size, spec.qkv_bias)
        output = self._linear(prefix, [names.attention_output], [spec.hidden_size], q_size, spec.output_bias)
        head_norms = [prefix + names.q_norm, prefix + names.k_norm] if spec.qk_norm else []
        attention = Attention(spec, index, qkv, output, *(self._vector(name, spec.head_dim) for name in head_norms))
        width = spec.intermediate_size
        gate_up = self._linear(prefix, names.gate_up, [width, width], spec.hidden_size, spec.mlp_bias)
        down = self._linear(prefix, [names.down], [spec.hidden_size], width, spec.mlp_bias)
        return DecoderLayer(
            self._vector(prefix + names.input_norm, spec.hidden_size),
            attention,
            self._vector(prefix + names.post_attention_norm, spec.hidden_size),
            GatedMLP(gate_up, down, spec.activation),
        )

    def _linear(
        self, prefix: str, modules: Sequence[str], num_rows: Sequence[int], num_columns: int, has_bias: bool
    ) -> Projection:
        weight = self._stack([f"{prefix}{module}.weight" for module in modules], num_rows, num_columns)
        bias = self._stack([f"{prefix}{module}.bias" for module in modules], num_rows) if has_bias else None
        return self._projection(weight, bias)

    def _projection(self, weight: Tensor, bias: Tensor | None, is_shared: bool = False) -> Projection:
        """is_shared: something else keeps the weight, too."""
        own = Linear(weight, bias)
        if self._activation_dtype == "auto":
            return own if is_shared or not PackedLinear.can_pack(weight) else PackedLinear(weight, bias)
        quantised = Int8Linear(weight, bias)
        self._weight_bytes += quantised.nbytes - (0 if is_shared else own.nbytes)
        return quantised

    def _vector(self, name: str, size: int) -> Tensor:
        return self._stack([name], [size])

    def _stack(self, names: Sequence[str], num_rows: Sequence[int], *columns: int) -> Tensor:
        """One new tensor with the named ones below each other."""
        stacked = torch.empty(sum(num_rows), *columns, dtype=self._dtype, device=self._device)
        for name, part in zip(names, stacked.split(list(num_rows)), strict=True):
            if name not in self._unused:
                raise BatchInferError(f"{self._source.where}: there is no tensor {name}")
            self._unused.discard(name)
            tensor = self._source.read(name)
            if tensor.shape != part.shape or not tensor.is_floating_point():
                raise BatchInferError(
                    f"{self._source.where}: tensor {name} is {tensor.dtype} {tuple(tensor.shape)}, "
                    f"not a float of {tuple(part.shape)}"
                )
            part.copy_(tensor)
        self._num_parameters += stacked.numel()
        self._weight_bytes += stacked.nbytes
        return stacked
