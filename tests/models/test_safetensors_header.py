"""The head that is written here, read by safetensors."""

import json

import pytest
import torch
from safetensors.torch import load

from batchinfer.models.safetensors_header import dtype_name, header, num_bytes

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_safetensors_reads_it(dtype):
    tensors = {
        "first": torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype),
        "a scalar €": torch.tensor(1).to(dtype),
        "empty": torch.zeros(0, 3).to(dtype),
    }
    head = header((name, dtype_name(dtype), tensor.shape) for name, tensor in tensors.items())
    assert len(head) % 8 == 0
    data = b"".join(tensor.flatten().view(torch.uint8).numpy().tobytes() for tensor in tensors.values())
    found = load(head + data)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == dtype
        assert torch.equal(found[name].to(torch.float32), tensor.to(torch.float32))
        assert num_bytes(dtype_name(dtype), tensor.shape) == tensor.nbytes
    assert json.loads(head[8:])["__metadata__"] == {"format": "pt"}
