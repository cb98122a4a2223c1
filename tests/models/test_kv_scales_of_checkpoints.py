"""KV scales in a checkpoint: which caches take them, and that keys and values are stored by them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import Runner, make_hf_model, save

from batchinfer.errors import BatchInferError
from batchinfer.models.loader import load_decoder

IDS = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(4))
KEY, VALUE = torch.tensor([0.02, 0.03]), torch.tensor([0.01])  # a head, and the layer


def checkpoint(path: Path, key: torch.Tensor, value: torch.Tensor, layers: int = 2, kind: str | None = None) -> Path:
    save(make_hf_model("llama"), path)
    scales = {}
    for layer in range(layers):
        scales[f"model.layers.{layer}.self_attn.k_scale"] = key.view(-1, 1, 1).clone()
        scales[f"model.layers.{layer}.self_attn.v_scale"] = value.clone()
    save_file(load_file(path / "model.safetensors") | scales, path / "model.safetensors", metadata={"format": "pt"})
    if kind is not None:
        weights = {"type": "int", "num_bits": 4, "strategy": "channel"}
        config = {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "kv_cache_scheme": {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "tensor"},
        }
        stored = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(stored | {"quantization_config": config}))
    return path


def kinds_of_scales(path: Path) -> dict[str, str]:
    decoder = load_decoder(path)
    specs = {dtype: decoder.kv_cache_spec(16, dtype) for dtype in ("auto", "fp8", "fp8_e5m2", "int8")}
    names = {(False, False): "none", (True, False): "token", (False, True): "checkpoint"}
    return {dtype: names[spec.per_token_scales, spec.static_scales] for dtype, spec in specs.items()}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (None, {"auto": "none", "fp8": "checkpoint", "fp8_e5m2": "checkpoint", "int8": "token"}),
        ("float", {"auto": "none", "fp8": "checkpoint", "fp8_e5m2": "checkpoint", "int8": "token"}),
        ("int", {"auto": "none", "fp8": "token", "fp8_e5m2": "token", "int8": "checkpoint"}),
    ],
)
def test_caches_whose_range_the_scales_fit_take_them(tmp_path, kind, expected):
    assert kinds_of_scales(checkpoint(tmp_path, KEY, VALUE, kind=kind)) == expected


def test_without_measured_scales_each_token_has_its_own(tmp_path):
    expected = {"auto": "none", "fp8": "token", "fp8_e5m2": "token", "int8": "token"}
    assert kinds_of_scales(save(make_hf_model("llama"), tmp_path / "none")) == expected
    one = torch.ones(1)
    assert kinds_of_scales(checkpoint(tmp_path / "ones", one, one)) == expected


def test_layers_without_scales_are_named(tmp_path):
    with pytest.raises(BatchInferError, match="layer 1 has no KV scales, but others have"):
        load_decoder(checkpoint(tmp_path, KEY, VALUE, layers=1))


@pytest.mark.parametrize(("dtype", "kind"), [("fp8", None), ("fp8_e5m2", None), ("int8", "int")])
def test_keys_and_values_are_stored_by_the_scales(tmp_path, dtype, kind):
    key, value = (scale * (4 if kind == "int" else 1) for scale in (KEY, VALUE))  # 127 steps reach less far than 448
    decoder = load_decoder(checkpoint(tmp_path, key, value, kind=kind), "fp32")
    exact, stored = Runner(decoder, "fp32"), Runner(decoder, dtype)
    expected, logits = (runner.logits("a", IDS, [40]) for runner in (exact, stored))
    places = torch.tensor(stored.tables["a"])
    for name, scale in (("key", key), ("value", value)):  # of the first layer, which no stored number has changed yet
        numbers = getattr(exact.cache, name)(0)[places] / scale.view(1, -1, 1, 1)
        codes = getattr(stored.cache, name)(0)[places]
        limit = {"fp8": 448, "fp8_e5m2": 57344, "int8": 127}[dtype]
        numbers = numbers.clamp(-limit, limit)
        assert torch.equal(codes, (numbers.round() if dtype == "int8" else numbers).to(codes.dtype))
    error = (logits - expected).norm() / expected.norm()
    assert 1e-4 < error < 0.3
