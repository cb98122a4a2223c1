"""What each format's tensors mean, decoded field by field as the formats are written down, equals the weight."""

import pytest
import torch

from batchinfer.quantization.rounding import Grid, round_to_fp8, stored_weight
from batchinfer.quantization.write_awq import awq_tensors
from batchinfer.quantization.write_compressed import fp8_tensors, packed_tensors
from batchinfer.quantization.write_gptq import gptq_tensors
from batchinfer.quantization.write_words import pack

ROWS, COLUMNS, GROUP = 32, 64, 16


def random_weight(bits, lowest_zero=0, permuted=False, symmetric=False):
    """Every integer and zero point occurs, the ends included."""
    generator = torch.Generator().manual_seed(bits)
    top = 2**bits
    integers = torch.randint(0, top, (ROWS, COLUMNS), generator=generator)
    zeros = torch.randint(lowest_zero, top, (ROWS, COLUMNS // GROUP), generator=generator).float()
    zeros[0], zeros[1] = lowest_zero, top - 1
    if symmetric:
        zeros.fill_(top // 2)
    scales = (torch.rand(ROWS, COLUMNS // GROUP, generator=generator) + 0.1).bfloat16().float()
    order = torch.randperm(COLUMNS, generator=generator) if permuted else None
    return stored_weight(integers.float(), scales, zeros, Grid(bits, GROUP, symmetric), order)


def field(word, bits, place):
    """Bits [place * bits, (place + 1) * bits) of an unsigned 32-bit word."""
    return ((word & 0xFFFFFFFF) >> (place * bits)) & (2**bits - 1)


def stream_field(words, bits, place):
    """Field `place` of 32-bit words read as one number, the first word lowest."""
    number = sum((word & 0xFFFFFFFF) << (32 * index) for index, word in enumerate(words))
    return (number >> (bits * place)) & (2**bits - 1)


def test_awq_gemm():
    weight = random_weight(4)
    tensors = awq_tensors(weight)
    assert {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()} == {
        "qweight": (torch.int32, (COLUMNS, ROWS // 8)),
        "qzeros": (torch.int32, (COLUMNS // GROUP, ROWS // 8)),
        "scales": (torch.float16, (COLUMNS // GROUP, ROWS)),
    }
    qweight, qzeros = tensors["qweight"].tolist(), tensors["qzeros"].tolist()
    shift = [0, 4, 1, 5, 2, 6, 3, 7]  # which nibble holds output 8c + j
    decoded = torch.empty(ROWS, COLUMNS)
    for n in range(ROWS):
        for k in range(COLUMNS):
            q = field(qweight[k][n // 8], 4, shift[n % 8])
            z = field(qzeros[k // GROUP][n // 8], 4, shift[n % 8])
            decoded[n, k] = (q - z) * float(tensors["scales"][k // GROUP, n])
    assert torch.equal(decoded, weight.dequantize())


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_version_1(bits, permuted):
    weight = random_weight(bits, lowest_zero=1, permuted=permuted)
    tensors = gptq_tensors(weight)
    assert tensors["qweight"].shape == (COLUMNS * bits // 32, ROWS)
    assert tensors["qzeros"].shape == (COLUMNS // GROUP, ROWS * bits // 32)
    assert tensors["g_idx"].dtype == torch.int32
    columns, zero_words = tensors["qweight"].T.tolist(), tensors["qzeros"].tolist()
    decoded = torch.empty(ROWS, COLUMNS)
    for n in range(ROWS):
        for k in range(COLUMNS):
            group = int(tensors["g_idx"][k])
            z = stream_field(zero_words[group], bits, n) + 1
            decoded[n, k] = (stream_field(columns[n], bits, k) - z) * float(tensors["scales"][group, n])
    assert torch.equal(decoded, weight.dequantize())
    assert permuted == (tensors["g_idx"].tolist() != [k // GROUP for k in range(COLUMNS)])


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_compressed_tensors(bits, symmetric):
    weight = random_weight(bits, symmetric=symmetric)
    tensors = packed_tensors(weight, symmetric, torch.bfloat16)
    assert tensors["weight_shape"].tolist() == [ROWS, COLUMNS]
    assert tensors["weight_packed"].shape == (ROWS, COLUMNS * bits // 32)
    assert ("weight_zero_point" in tensors) != symmetric
    rows = tensors["weight_packed"].tolist()
    zero_words = None if symmetric else tensors["weight_zero_point"].T.tolist()
    half = 2 ** (bits - 1)
    decoded = torch.empty(ROWS, COLUMNS)
    for n in range(ROWS):
        for k in range(COLUMNS):
            signed = stream_field(rows[n], bits, k) - half
            group = k // GROUP
            zero = 0 if zero_words is None else stream_field(zero_words[group], bits, n) - half
            decoded[n, k] = (signed - zero) * float(tensors["weight_scale"][n, group])
    assert torch.equal(decoded, weight.dequantize())


def test_fp8():
    weight = round_to_fp8(torch.randn(8, 16, generator=torch.Generator().manual_seed(0)))
    tensors = fp8_tensors(weight, torch.bfloat16)
    assert tensors["weight_scale"].shape == (8, 1)
    assert torch.equal(tensors["weight"].float() * tensors["weight_scale"].float(), weight.dequantize())


def test_packing_rounds_up_to_words():
    words = pack(torch.tensor([[1, 2, 3, 4, 5, 6, 7, 0, 7]], dtype=torch.uint8), 3)
    assert words.shape == (1, 1)
    assert [field(int(words[0, 0]), 3, place) for place in range(9)] == [1, 2, 3, 4, 5, 6, 7, 0, 7]
    assert pack(torch.zeros(2, 11, dtype=torch.uint8), 3).shape == (2, 2)
