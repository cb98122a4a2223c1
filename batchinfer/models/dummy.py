"""A checkpoint without files: tensors drawn at random in the shapes that a config.json asks for, to measure a model
whose weights are not here. Called by loader."""

import zlib
from collections.abc import Collection, Iterator, Mapping
from math import prod

import torch
from torch import Tensor

from batchinfer.errors import UsageError
from batchinfer.models.families.common import WeightNames
from batchinfer.models.spec import DecoderSpec
from batchinfer.quantization.read_awq import AwqScheme
from batchinfer.quantization.scheme import QuantizationScheme

_AWQ_SPREAD = 4.6  # standard deviation of the numbers 0 to 15
_Shape = tuple[int, ...]


class DummyCheckpoint:
    """Each tensor depends on its name and shape alone. Weights have variance 1 / inputs, so that what a layer adds has
    the size of what it got; norms are 1 and biases 0.

    scheme: None, or AWQ in its gemm layout, with 4-bit numbers about a zero of 8. Raises UsageError on others.
    """

    where = "--load-format dummy"

    def __init__(self, spec: DecoderSpec, scheme: QuantizationScheme | None, device: torch.device) -> None:
        if scheme is not None and not (isinstance(scheme, AwqScheme) and scheme.layout == "gemm"):
            raise UsageError(f"--load-format dummy: it makes 16-bit weights and AWQ's gemm layout, not {scheme.method}")
        self._device = device
        self._shapes: dict[str, _Shape] = dict(_plain(spec, WeightNames()))
        for module, outputs, inputs, has_bias in _linears(spec, WeightNames()):
            self._shapes |= _linear(module, outputs, inputs, scheme)
            if has_bias:
                self._shapes[f"{module}.bias"] = (outputs,)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    @property
    def names(self) -> Collection[str]:
        return self._shapes.keys()

    def read(self, name: str) -> Tensor:
        """On the device, where drawing is fastest."""
        shape, kind = self._shapes[name], name.rpartition(".")[2]
        if kind == "qweight":
            return self._whole(name, shape)
        if kind == "qzeros":
            return torch.full(shape, -0x77777778, dtype=torch.int32, device=self._device)  # 8 in each 4 bits
        if kind == "scales":  # groups of inputs stand in qweight's first dimension
            inputs = self._shapes[name.removesuffix("scales") + "qweight"][0]
            return torch.full(shape, inputs**-0.5 / _AWQ_SPREAD, dtype=torch.float16, device=self._device)
        if len(shape) == 1:
            return torch.full(shape, float(kind == "weight"), device=self._device)
        return self._normal(name, shape) * shape[1] ** -0.5

    def _normal(self, name: str, shape: _Shape) -> Tensor:
        return torch.randn(shape, generator=self._generator(name), device=self._device)

    def _whole(self, name: str, shape: _Shape) -> Tensor:
        """int32 of random bits."""
        octets = torch.randint(
            0, 256, (4 * prod(shape),), dtype=torch.uint8, generator=self._generator(name), device=self._device
        )
        return octets.view(torch.int32).view(shape)

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))


def _plain(spec: DecoderSpec, names: WeightNames) -> Iterator[tuple[str, _Shape]]:
    """What no format quantises."""
    yield names.embedding, (spec.vocab_size, spec.hidden_size)
    yield names.final_norm, (spec.hidden_size,)
    if not spec.tie_word_embeddings:
        yield names.lm_head, (spec.vocab_size, spec.hidden_size)
    for layer in range(spec.num_layers):
        prefix = names.layer.format(layer)
        yield prefix + names.input_norm, (spec.hidden_size,)
        yield prefix + names.post_attention_norm, (spec.hidden_size,)
        if spec.qk_norm:
            yield prefix + names.q_norm, (spec.head_dim,)
            yield prefix + names.k_norm, (spec.head_dim,)


def _linears(spec: DecoderSpec, names: WeightNames) -> Iterator[tuple[str, int, int, bool]]:
    """(module, outputs, inputs, whether it has a bias) of each layer's projections."""
    hidden, width = spec.hidden_size, spec.intermediate_size
    q_size, kv_size = spec.num_q_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    for layer in range(spec.num_layers):
        prefix = names.layer.format(layer)
        for module, size in zip(names.qkv, (q_size, kv_size, kv_size), strict=True):
            yield prefix + module, size, hidden, spec.qkv_bias
        yield prefix + names.attention_output, hidden, q_size, spec.output_bias
        for module in names.gate_up:
            yield prefix + module, width, hidden, spec.mlp_bias
        yield prefix + names.down, hidden, width, spec.mlp_bias


def _linear(module: str, outputs: int, inputs: int, scheme: QuantizationScheme | None) -> dict[str, _Shape]:
    if not isinstance(scheme, AwqScheme) or any(part in module for part in scheme.unquantized):
        return {f"{module}.weight": (outputs, inputs)}
    groups = 1 if scheme.group_size == -1 else inputs // scheme.group_size
    return {
        f"{module}.qweight": (inputs, outputs // 8),
        f"{module}.qzeros": (groups, outputs // 8),
        f"{module}.scales": (groups, outputs),
    }
