"""The head that is written here, read by safetensors, and the other way about."""

import json
from io import BytesIO

import pytest
import torch
from safetensors.torch import load, save_file

from batchinfer.models.safetensors_header import dtype_name, header, num_bytes, read_head

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


def test_what_safetensors_writes_is_read(tmp_path):
    tensors = {"b": torch.arange(6, dtype=torch.int16).view(2, 3), "a": torch.zeros(5, 0), "c": torch.tensor(2.5)}
    save_file(tensors, tmp_path / "x.safetensors", {"format": "pt"})
    content = (tmp_path / "x.safetensors").read_bytes()
    with open(tmp_path / "x.safetensors", "rb") as file:
        head = read_head(file)
    assert head.num_bytes == min(place.start for place in head.tensors.values())
    assert {name: (place.shape, place.num_bytes) for name, place in head.tensors.items()} == {
        name: (tuple(tensor.shape), tensor.nbytes) for name, tensor in tensors.items()
    }
    for name, tensor in tensors.items():
        place = head.tensors[name]
        assert place.dtype == dtype_name(tensor.dtype)
        assert content[place.start : place.stop] == tensor.numpy().tobytes()


@pytest.mark.parametrize(
    "table", [b"[1]", b"{", b'{"a": 1}', b'{"a": {"dtype": "F32", "shape": []}}', b'{"a": {"data_offsets": [0]}}']
)
def test_a_head_that_is_none(table):
    with pytest.raises(ValueError, match=r"(head lacks|Expecting|not enough values)"):
        read_head(BytesIO(len(table).to_bytes(8, "little") + table))
    with pytest.raises(ValueError, match="too long"):
        read_head(BytesIO(b"\xff" * 8 + table))
