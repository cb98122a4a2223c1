"""Quantised layers written bit by bit from the formats' descriptions, in plain Python, for tests of the readers."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

GEMM_COLUMNS = [0, 2, 4, 6, 1, 3, 5, 7]  # AutoAWQ: nibble i of a word holds output 8 c + GEMM_COLUMNS[i]


class TensorDict(dict[str, Tensor]):
    """Tensors in memory with the interface of a checkpoint."""

    where = "checkpoint"

    @property
    def names(self) -> Any:
        return self.keys()

    def read(self, name: str) -> Tensor:
        return self[name]


def bit_stream(fields: list[int], bits: int, word_bits: int = 32) -> list[int]:
    """Words, as signed integers, in which the fields follow each other from the lowest bit up."""
    total = sum(field << (bits * i) for i, field in enumerate(fields))
    count = -(-len(fields) * bits // word_bits)
    words = [(total >> (word_bits * i)) & (2**word_bits - 1) for i in range(count)]
    return [word - 2**word_bits if word >= 2 ** (word_bits - 1) else word for word in words]


def pack_rows(values: Tensor, bits: int) -> Tensor:
    """int32 [rows, words] of integers [rows, n]."""
    return torch.tensor([bit_stream(row, bits) for row in values.tolist()], dtype=torch.int32)


def random_layer(num_outputs: int, num_inputs: int, bits: int, group: int, seed: int = 0) -> tuple[Tensor, ...]:
    """Integers [N, K], fp16 scales [N, G] and whole zero points [N, G], 0 and the largest among them."""
    generator = torch.Generator().manual_seed(seed)
    groups = -(-num_inputs // group)
    values = torch.randint(0, 2**bits, (num_outputs, num_inputs), generator=generator)
    scales = (torch.rand(num_outputs, groups, generator=generator) * 0.1 + 0.001).half()
    zeros = torch.randint(0, 2**bits, (num_outputs, groups), generator=generator)
    zeros.view(-1)[0], zeros.view(-1)[-1] = 0, 2**bits - 1
    zeros.view(-1)[1] = 0
    return values, scales, zeros


def dequantize(values: Tensor, scales: Tensor, zeros: Tensor, group_of_input: list[int]) -> Tensor:
    """float32 [N, K] by the formula, one input at a time."""
    columns = []
    for k, group in enumerate(group_of_input):
        difference = (values[:, k] - zeros[:, group]).to(torch.float32)
        columns.append(difference * scales[:, group].to(torch.float32))
    return torch.stack(columns, dim=1)


def awq_gemm(values: Tensor, scales: Tensor, zeros: Tensor) -> dict[str, Tensor]:
    return {"qweight": _gemm_words(values.T), "qzeros": _gemm_words(zeros.T), "scales": scales.T.contiguous()}


def _gemm_words(columns: Tensor) -> Tensor:
    rows = []
    for row in columns.tolist():
        ordered = [row[8 * word + column] for word in range(len(row) // 8) for column in GEMM_COLUMNS]
        rows.append(bit_stream(ordered, 4))
    return torch.tensor(rows, dtype=torch.int32)


def awq_gemv(values: Tensor, scales: Tensor, zeros: Tensor, padded_groups: int) -> dict[str, Tensor]:
    missing = padded_groups - scales.shape[1]
    return {
        "qweight": pack_rows(values, 4),
        "qzeros": pack_rows(torch.nn.functional.pad(zeros, (0, missing)), 4),
        "scales": torch.nn.functional.pad(scales, (0, missing)),
    }


def awq_gemv_fast(values: Tensor, scales: Tensor, zeros: Tensor, padded_groups: int) -> dict[str, Tensor]:
    """The zeros become offsets, rounded to fp16. AutoAWQ's name for them; llm-awq says scaled_zeros."""
    missing = padded_groups - scales.shape[1]
    offsets = -(scales.float() * zeros).half()
    rows = [_fast_words(values[first : first + 4].tolist()) for first in range(0, len(values), 4)]
    return {
        "qweight": torch.tensor(rows, dtype=torch.int16),
        "scales": torch.nn.functional.pad(scales, (0, missing)).T.contiguous(),
        "qzeros": torch.nn.functional.pad(offsets, (0, missing)).T.contiguous(),
    }


def _fast_words(rows: list[list[int]]) -> list[int]:
    """Of 4 rows: 64 inputs of each in turn, four neighbouring fields a word. Within 32 inputs pairs are dealt out to
    four octets, and in an octet the even ones come first."""
    pairs = [8 * pair + 2 * octet + i for octet in range(4) for pair in range(4) for i in range(2)]
    order = [pairs[8 * octet + i] for octet in range(4) for i in (0, 2, 4, 6, 1, 3, 5, 7)]
    words = []
    for stride in range(0, len(rows[0]), 64):
        fields = [row[stride + half + place] for row in rows for half in (0, 32) for place in order]
        words += bit_stream(fields, 4, word_bits=16)
    return words


def gptq(values: Tensor, scales: Tensor, zeros: Tensor, bits: int, group_of_input: list[int], v1: bool = False) -> dict:
    stored = (zeros - 1) % 2**bits if v1 else zeros
    return {
        "qweight": pack_rows(values, bits).T.contiguous(),
        "qzeros": pack_rows(stored.T, bits),
        "scales": scales.T.contiguous(),
        "g_idx": torch.tensor(group_of_input, dtype=torch.int32),
    }


def compressed_tensors(values: Tensor, scales: Tensor, zeros: Tensor | None, bits: int) -> dict[str, Tensor]:
    """zeros None: symmetric."""
    tensors = {
        "weight_packed": pack_rows(values, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(values.shape),
    }
    if zeros is not None:
        tensors["weight_zero_point"] = pack_rows(zeros.T, bits).T.contiguous()
    return tensors


def e4m3(byte: int) -> float:
    """The number that a byte stands for: sign, 4 bits of exponent with bias 7, 3 bits of mantissa; no infinities."""
    sign, exponent, mantissa = -1.0 if byte & 128 else 1.0, (byte >> 3) & 15, byte & 7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def random_e4m3(num_outputs: int, num_inputs: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """float8_e4m3fn [N, K] of all its numbers, and float32 of the same by the format's definition."""
    generator = np.random.default_rng(seed)
    octets = generator.integers(0, 256, (num_outputs, num_inputs), dtype=np.uint8)
    octets[(octets & 127) == 127] = 0  # NaN
    numbers = np.vectorize(e4m3, otypes=[np.float32])(octets)
    return torch.from_numpy(octets).view(torch.float8_e4m3fn), torch.from_numpy(numbers)
