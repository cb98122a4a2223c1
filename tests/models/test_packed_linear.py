"""Projections over packed weights give the plain product's bits for any number of rows."""

import pytest
import torch
import torch.nn.functional as F

from batchinfer.models.packed_linear import PackedLinear

pytestmark = pytest.mark.skipif(
    not PackedLinear.can_pack(torch.zeros(1, 1, dtype=torch.bfloat16)), reason="needs a CPU with bf16 products"
)


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(960, 576), (192, 80), (33, 50)])
def test_bits_of_the_plain_product(shape, has_bias, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    weight, bias = torch.randn(shape).bfloat16(), torch.randn(shape[0]).bfloat16() if has_bias else None
    packed = PackedLinear(weight, bias)
    assert packed.nbytes == 2 * (weight.numel() + (shape[0] if has_bias else 0))
    x = torch.randn(300, shape[1]).bfloat16()
    whole = F.linear(x, weight, bias)
    for count in (*range(1, 20), 63, 64, 256, 257, 300):
        assert torch.equal(packed(x[:count]), whole[:count])
    assert torch.equal(packed(torch.cat((x, x), dim=1)[:, shape[1] :]), whole)
    out = torch.empty(300, shape[0])
    packed.fill(out, x)
    assert torch.equal(out, whole.float())
    torch.set_num_threads(before)


def test_other_dtypes_are_not_packed():
    assert not PackedLinear.can_pack(torch.zeros(4, 4))
    assert not PackedLinear.can_pack(torch.zeros(4, 4, dtype=torch.float16))
