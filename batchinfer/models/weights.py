"""Builds a Decoder out of named tensors, one layer at a time, so that beside the finished weights only one layer's
originals are in memory. Called by loader."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from batchinfer.errors import BatchInferError, UsageError
from batchinfer.kernels.quantized_linear.stored import concatenate
from batchinfer.models.attention import Attention
from batchinfer.models.decoder import Decoder, DecoderLayer
from batchinfer.models.families.common import WeightNames
from batchinfer.models.linear import Fp8Linear, Int8Linear, Linear, Lookup, PackedLinear, Projection, SideBySide
from batchinfer.models.mlp import GatedMLP
from batchinfer.models.spec import DecoderSpec
from batchinfer.quantization.kv_scales import KVScales, are_usable, take_kv_scales
from batchinfer.quantization.scheme import QuantizationScheme, Stored
from batchinfer.quantization.tensors import ModuleTensors, TensorSource


def build_decoder(
    spec: DecoderSpec,
    source: TensorSource,
    dtype: torch.dtype,
    device: torch.device,
    activation_dtype: str = "auto",
    names: WeightNames | None = None,
    scheme: QuantizationScheme | None = None,
    kv_scale_dtypes: Collection[str] = (),
) -> Decoder:
    """activation_dtype: one of config.ACTIVATION_DTYPES, what all products run in, but with fp8 the head's; the
    embedding and the norms keep `dtype`. scheme: how the source's linear layers are quantised; None: not at all.
    kv_scale_dtypes: dtypes of the KV cache that the source's KV scales fit, where it has some. Raises BatchInferError
    naming a parameter without a tensor, a tensor of another shape, or a tensor that no parameter takes; UsageError
    where the device's kernels do not take the quantised form, or have no products of fp8."""
    if activation_dtype == "fp8":
        try:
            Fp8Linear.check(device)
        except ValueError as error:
            raise UsageError(f"--activation-dtype fp8: {error}; leave it at auto, or take int8") from error
    builder = _Builder(spec, source, dtype, device, activation_dtype, names or WeightNames(), scheme)
    return builder.build(kv_scale_dtypes)


class _Builder:
    def __init__(
        self,
        spec: DecoderSpec,
        source: TensorSource,
        dtype: torch.dtype,
        device: torch.device,
        activation_dtype: str,
        names: WeightNames,
        scheme: QuantizationScheme | None,
    ) -> None:
        self._spec = spec
        self._source = source
        self._dtype = dtype
        self._device = device
        self._activation_dtype = activation_dtype
        self._names = names
        self._scheme = scheme
        self._unused = {name for name in source.names if not name.endswith(names.derived)}
        self._kv_scales: list[KVScales | None] = []
        self._num_parameters = 0
        self._weight_bytes = 0
        self._scratch_bytes = 0

    def build(self, kv_scale_dtypes: Collection[str]) -> Decoder:
        spec, names = self._spec, self._names
        embedding, stored = self._embedding()
        layers = [self._layer(layer) for layer in range(spec.num_layers)]
        final_norm = self._vector(names.final_norm, spec.hidden_size)
        if self._activation_dtype == "fp8":  # errors of the head's product would be the logits'
            self._activation_dtype = "auto"
        scratch_bytes = self._scratch_bytes  # without the head's: results wider than activations need none
        lm_head, lookup = self._lm_head(embedding, stored)
        if self._unused:
            raise BatchInferError(f"{self._source.where}: tensor {min(self._unused)} has no place in this model")
        static_dtypes = kv_scale_dtypes if are_usable(self._kv_scales, self._source.where) else ()
        sizes = (self._num_parameters, self._weight_bytes)
        return Decoder(spec, lookup, layers, final_norm, lm_head, *sizes, static_dtypes, scratch_bytes)

    def _embedding(self) -> tuple[Tensor, Stored | None]:
        """The table that rows are looked up in, in the model's precision, and the quantised form that it came from."""
        shape = (self._spec.vocab_size, self._spec.hidden_size)
        stored = self._stored(self._names.embedding.removesuffix(".weight"), *shape)
        if stored is None:
            return self._stack([self._names.embedding], [shape[0]], shape[1]), None
        table = stored.dequantize(self._dtype)
        self._weight_bytes += table.nbytes
        return table, stored

    def _lm_head(self, embedding: Tensor, stored_embedding: Stored | None) -> tuple[Projection, Lookup]:
        """The head, and what looks up rows of the embedding: where both are one, and the head's form allows it, the
        head itself."""
        table, module = Linear(embedding), self._names.lm_head.removesuffix(".weight")
        stored = self._stored(module, self._spec.vocab_size, self._spec.hidden_size)
        if stored is not None:  # also where the embedding is tied: the file's own head is what was measured
            return self._quantized_projection(module, stored, None), table
        if not self._spec.tie_word_embeddings:
            return self._linear("", [module], [self._spec.vocab_size], self._spec.hidden_size, False), table
        self._check_tied(embedding)
        if stored_embedding is not None:
            return self._quantized_projection(self._names.embedding, stored_embedding, None), table
        head = self._projection(embedding, None, is_shared=True)
        if isinstance(head, PackedLinear) and head.gives_rows:
            self._weight_bytes -= embedding.nbytes
            return head, head
        return head, head if isinstance(head, Linear) else table

    def _check_tied(self, embedding: Tensor) -> None:
        """Some checkpoints store the tied tensor twice."""
        name = self._names.lm_head
        if name in self._unused:
            self._unused.discard(name)
            if not torch.equal(self._source.read(name).to(self._device, self._dtype), embedding):
                raise BatchInferError(
                    f"{self._source.where}: {name} differs from the embedding, but tie_word_embeddings is true"
                )

    def _layer(self, index: int) -> DecoderLayer:
        spec, names = self._spec, self._names
        prefix = names.layer.format(index)
        q_size, kv_size = spec.num_q_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        qkv = self._linear(prefix, names.qkv, [q_size, kv_size, kv_size], spec.hidden_size, spec.qkv_bias)
        output = self._linear(prefix, [names.attention_output], [spec.hidden_size], q_size, spec.output_bias)
        head_norms = [prefix + names.q_norm, prefix + names.k_norm] if spec.qk_norm else []
        scales = take_kv_scales(self._source, prefix, self._unused, spec.num_kv_heads, self._device)
        self._kv_scales.append(scales)
        norms = (self._vector(name, spec.head_dim) for name in head_norms)
        attention = Attention(spec, index, qkv, output, *norms, kv_scales=scales)
        width = spec.intermediate_size
        gate_up = self._linear(prefix, names.gate_up, [width, width], spec.hidden_size, spec.mlp_bias, is_gated=True)
        down = self._linear(prefix, [names.down], [spec.hidden_size], width, spec.mlp_bias)
        return DecoderLayer(
            self._vector(prefix + names.input_norm, spec.hidden_size),
            attention,
            self._vector(prefix + names.post_attention_norm, spec.hidden_size),
            GatedMLP(gate_up, down, spec.activation),
        )

    def _linear(
        self,
        prefix: str,
        modules: Sequence[str],
        num_rows: Sequence[int],
        num_columns: int,
        has_bias: bool,
        is_gated: bool = False,
    ) -> Projection:
        """Layers of one input as one projection where they are stored alike, else side by side. is_gated: the first is
        the gate of the second."""
        modules = [prefix + module for module in modules]
        stored = [self._stored(module, rows, num_columns) for module, rows in zip(modules, num_rows, strict=True)]
        are_quantized = [weight for weight in stored if weight is not None]
        if not has_bias and are_quantized:
            self._drop_zero_biases(modules)
        bias = self._stack([f"{module}.bias" for module in modules], num_rows) if has_bias else None
        if not are_quantized:
            weight = self._stack([f"{module}.weight" for module in modules], num_rows, num_columns)
            return self._projection(weight, bias, is_gated=is_gated)
        if len(are_quantized) == len(modules) and (fused := _fuse(are_quantized)) is not None:
            return self._quantized_projection(modules[0], fused, bias, is_gated)
        biases = [None] * len(modules) if bias is None else bias.split(list(num_rows))
        parts: list[Projection] = []
        for module, rows, own, own_bias in zip(modules, num_rows, stored, biases, strict=True):
            if own is None:
                parts.append(self._projection(self._stack([f"{module}.weight"], [rows], num_columns), own_bias))
            else:
                parts.append(self._quantized_projection(module, own, own_bias))
        return SideBySide(parts)

    def _stored(self, module: str, num_rows: int, num_columns: int) -> Stored | None:
        """The layer's quantised weight; None where it is of floats."""
        tensors = ModuleTensors(self._source, module, self._unused, self._device)
        if self._scheme is None or not self._scheme.is_quantized(tensors):
            return None
        stored = self._scheme.read(tensors, num_rows, num_columns)
        self._num_parameters += num_rows * num_columns
        return stored

    def _drop_zero_biases(self, modules: Sequence[str]) -> None:
        """Some quantisers give each layer a bias, of zeros where the model has none."""
        for name in [f"{module}.bias" for module in modules]:
            if name in self._unused and not bool(self._source.read(name).any()):
                self._unused.discard(name)

    def _quantized_projection(
        self, name: str, weight: Stored, bias: Tensor | None, is_gated: bool = False
    ) -> Projection:
        """name: of the first module in it, for messages."""
        if self._activation_dtype == "int8":
            projection: Projection = Int8Linear(weight.dequantize(), bias, is_gated)
        else:
            try:
                projection = self._stored_projection(weight, bias, is_gated)
            except ValueError as error:
                raise UsageError(
                    f"{self._source.where}: {name}: {error}; run it with --device cpu, or quantise the 16-bit model in "
                    "such groups"
                ) from error
        self._weight_bytes += projection.nbytes - (0 if bias is None else bias.nbytes)
        return projection

    def _stored_projection(self, weight: Stored, bias: Tensor | None, is_gated: bool) -> Projection:
        """By the checkpoint's own numbers."""
        if self._activation_dtype == "fp8":
            return Fp8Linear(weight, bias)
        projection = PackedLinear(weight, bias, is_gated)
        self._scratch_bytes = max(self._scratch_bytes, projection.scratch_bytes(self._dtype))
        return projection

    def _projection(
        self, weight: Tensor, bias: Tensor | None, is_shared: bool = False, is_gated: bool = False
    ) -> Projection:
        """is_shared: something else keeps the weight, too."""
        own = Linear(weight, bias)
        if self._activation_dtype == "auto" and not PackedLinear.is_best_for(weight):
            return own
        made: PackedLinear | Int8Linear | Fp8Linear
        if self._activation_dtype == "fp8":
            made = Fp8Linear(weight, bias)
        else:
            made = (Int8Linear if self._activation_dtype == "int8" else PackedLinear)(weight, bias, is_gated)
        self._weight_bytes += made.nbytes - (0 if is_shared else own.nbytes)
        return made

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
            if tensor.shape != part.shape or not _is_float(tensor):
                raise BatchInferError(
                    f"{self._source.where}: tensor {name} is {tensor.dtype} {tuple(tensor.shape)}, "
                    f"not a float of {tuple(part.shape)}"
                )
            part.copy_(tensor)
        self._num_parameters += stacked.numel()
        self._weight_bytes += stacked.nbytes
        return stacked


def _is_float(tensor: Tensor) -> bool:
    """Of 16 bits or more: 8 mean nothing without their scale."""
    return tensor.is_floating_point() and tensor.element_size() > 1


def _fuse(weights: Sequence[Stored]) -> Stored | None:
    """The weights below each other; None where they are not stored alike."""
    try:
        return concatenate(weights)
    except ValueError:
        return None
