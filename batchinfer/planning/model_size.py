"""What a model's weights will take in memory, from the heads of its safetensors files: no tensor is read. Called by
plan.py."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from batchinfer.cache.spec import ELEMENT_BYTES
from batchinfer.errors import BatchInferError
from batchinfer.models.checkpoint import weight_files
from batchinfer.models.families.common import WeightNames
from batchinfer.models.safetensors_header import read_head
from batchinfer.models.spec import DecoderSpec

if TYPE_CHECKING:
    from batchinfer.quantization.scheme import QuantizationScheme

_FLOATS = ("F64", "F32", "F16", "BF16")
_DUMMY_DTYPES = {"qweight": ("I32", 4), "qzeros": ("I32", 4), "scales": ("F16", 2)}  # of all else F32
_INT8_OUTPUTS, _INT8_ROTATION, _INT8_GROUP = 32, 64, 192  # see kernels/quantized_linear/weight.py
_PACKED_INPUTS = 4  # see kernels/quantized_linear/packed.py
_SUFFIXES = (".weight_packed", ".weight_blocks", ".weight_scale_inv", ".qweight", ".weight")  # of a layer's main tensor


class StoredTensor(NamedTuple):
    """As a file's head has it. dtype: as in "BF16"."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """Bytes in memory. total: of everything. linear: of the layers' projections, and head: of the product with the
    vocabulary, which a step reads once each. names: of the tensors in the files."""

    total: int
    linear: int
    head: int
    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class WeightForm:
    """How the weights will be kept. dtype: as in "bf16". int8, fp8: --activation-dtype. packs: products read a form of
    their own. gguf_types: of each module that is kept in blocks."""

    dtype: str
    int8: bool
    packs: bool
    gguf_types: Mapping[str, str]
    fp8: bool = False


def read_heads(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of the model directory's safetensors files. Raises BatchInferError where a run would find no files,
    and for one that is none."""
    return {name: tensor for file in weight_files(path) for name, tensor in _read_head(file)}


def dummy_heads(spec: DecoderSpec, scheme: "QuantizationScheme | None") -> dict[str, StoredTensor]:
    """Every tensor that --load-format dummy draws. Raises UsageError for a scheme that it does not make."""
    import torch  # here, as is what draws: nothing else of this module needs them

    from batchinfer.models.dummy import DummyCheckpoint

    found = {}
    for name, shape in DummyCheckpoint(spec, scheme, torch.device("cpu")).shapes.items():
        dtype, size = _DUMMY_DTYPES.get(name.rpartition(".")[2], ("F32", 4))
        found[name] = StoredTensor(dtype, shape, size * math.prod(shape))
    return found


def _read_head(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    try:
        with open(file, "rb") as opened:
            tensors = read_head(opened).tensors
    except (OSError, ValueError) as error:
        raise BatchInferError(f"{file}: not a readable safetensors file: {error}") from error
    for name, place in tensors.items():
        yield name, StoredTensor(place.dtype, place.shape, place.num_bytes)


def weight_sizes(tensors: Mapping[str, StoredTensor], spec: DecoderSpec, form: WeightForm) -> WeightSizes:
    """What models/weights.build_decoder makes of the tensors."""
    names = WeightNames()
    sizes, sizes_of_head = _Sizes(form), _Sizes(replace(form, fp8=False))
    embedding, head = names.embedding.removesuffix(".weight"), names.lm_head.removesuffix(".weight")
    of_modules: dict[str, list[str]] = {}
    for name in tensors:
        if not name.endswith(names.derived):
            of_modules.setdefault(_module(name), []).append(name)
    linear = head_bytes = total = 0
    for module, members in of_modules.items():
        stored = {name.removeprefix(module): tensors[name] for name in members}
        if module == embedding:
            table = spec.vocab_size * spec.hidden_size * ELEMENT_BYTES[form.dtype]
            tied = spec.tie_word_embeddings and not _is_quantized(tensors, head)
            head_bytes = max(head_bytes, sizes_of_head.projection(module, stored)) if tied else head_bytes
            is_filled_up = form.packs and spec.hidden_size % _PACKED_INPUTS > 0
            is_head = tied and not (form.int8 or is_filled_up or _is_quantized(tensors, module))
            total += head_bytes if is_head else table + (head_bytes if tied else 0)
        elif module == head:
            if spec.tie_word_embeddings and not _is_quantized(tensors, head):
                continue
            head_bytes = sizes_of_head.projection(module, stored)
            total += head_bytes
        else:
            size = sizes.projection(module, stored)
            total += size
            linear += size if _is_matrix(stored) else 0
    return WeightSizes(total, linear, head_bytes, frozenset(tensors))


class _Sizes:
    """Bytes of a module's tensors in memory."""

    def __init__(self, form: WeightForm) -> None:
        self._form = form

    def projection(self, module: str, stored: Mapping[str, StoredTensor]) -> int:
        packed = stored.get(".qweight") or stored.get(".weight_packed")
        if packed is not None:
            return self._integers(packed, stored) + self._bias(stored)
        weight = stored.get(".weight")
        if weight is not None and weight.dtype.startswith("F8"):
            return self._fp8(weight, stored) + self._bias(stored)
        return sum(self._tensor(module, suffix, tensor) for suffix, tensor in stored.items())

    def _tensor(self, module: str, suffix: str, tensor: StoredTensor) -> int:
        if suffix == ".weight_blocks":
            return self._blocks(self._form.gguf_types[module], tensor)
        if tensor.dtype not in _FLOATS or suffix not in (".weight", ".bias"):
            return tensor.num_bytes
        if suffix == ".weight" and len(tensor.shape) == 2 and self._form.int8:
            return _int8_bytes(*tensor.shape)
        if suffix == ".weight" and len(tensor.shape) == 2 and self._form.fp8:
            return _fp8_bytes(*tensor.shape)
        return math.prod(tensor.shape) * ELEMENT_BYTES[self._form.dtype]

    def _bias(self, stored: Mapping[str, StoredTensor]) -> int:
        bias = stored.get(".bias")
        return 0 if bias is None else math.prod(bias.shape) * ELEMENT_BYTES[self._form.dtype]

    def _integers(self, packed: StoredTensor, stored: Mapping[str, StoredTensor]) -> int:
        """The numbers as they are stored, and of each group a scale and a zero of 16 bits."""
        scales = stored.get(".scales") or stored.get(".weight_scale")
        groups = 0 if scales is None else math.prod(scales.shape)
        return (2 if self._form.int8 else 1) * packed.num_bytes + groups * 4

    def _fp8(self, weight: StoredTensor, stored: Mapping[str, StoredTensor]) -> int:
        """A byte a number, and of each output a scale and a zero of 32 bits for each of its blocks."""
        if self._form.int8:
            return _int8_bytes(*weight.shape)
        scales = stored.get(".weight_scale") or stored.get(".weight_scale_inv")
        blocks = scales.shape[1] if scales is not None and len(scales.shape) == 2 else 1
        return weight.num_bytes + weight.shape[0] * blocks * 8

    def _blocks(self, kind: str, tensor: StoredTensor) -> int:
        from batchinfer.quantization.read_gguf import BLOCK_TYPES  # here, as it brings torch

        block = BLOCK_TYPES[kind]
        rows, columns = tensor.shape[0], tensor.shape[1] // block.num_bytes * block.num_weights
        if self._form.int8:
            return _int8_bytes(rows, columns)
        return rows * columns * (8 if block.bits > 4 else 4) // 8 + rows * (columns // block.group_size) * 4


def _int8_bytes(num_outputs: int, num_inputs: int) -> int:
    """As QuantizedWeight: a byte a number, and a scale and an offset of 4 bytes each a group."""
    outputs = -(-num_outputs // _INT8_OUTPUTS) * _INT8_OUTPUTS
    return outputs * (-(-num_inputs // _INT8_ROTATION) * _INT8_ROTATION + -(-num_inputs // _INT8_GROUP) * 8)


def _fp8_bytes(num_outputs: int, num_inputs: int) -> int:
    """As PackedWeight: a byte a number, and of each output a scale and a zero of 4 bytes each."""
    outputs = -(-num_outputs // _INT8_OUTPUTS) * _INT8_OUTPUTS
    return outputs * (-(-num_inputs // 4) * 4 + 8)


def _module(name: str) -> str:
    """ "model.layers.0.mlp.down_proj" of each of its tensors."""
    for suffix in _SUFFIXES:
        if name.endswith(suffix):
            return name.removesuffix(suffix)
    return name.rpartition(".")[0]


def _is_matrix(stored: Mapping[str, StoredTensor]) -> bool:
    return any(len(tensor.shape) > 1 for tensor in stored.values())


def _is_quantized(tensors: Mapping[str, StoredTensor], module: str) -> bool:
    """Whether the file has the module in other than floats."""
    suffixes: Sequence[str] = (".weight_packed", ".weight_blocks", ".qweight")
    weight = tensors.get(f"{module}.weight")
    return any(f"{module}{suffix}" in tensors for suffix in suffixes) or (
        weight is not None and weight.dtype not in _FLOATS
    )
