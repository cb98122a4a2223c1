"""Whole checkpoints in each quantised format, written bit by bit: their logits are those of the same model with the
dequantised weights as floats."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checkpoints import FORMATS, GROUP, Written, write_checkpoint
from safetensors.torch import load_file, save_file
from tiny_models import Runner, make_hf_model, save

from batchinfer.config import ModelConfig
from batchinfer.errors import BatchInferError, UsageError
from batchinfer.models.linear import Int8Linear, Linear, PackedLinear, SideBySide
from batchinfer.models.loader import checkpoint_options, load_decoder

IDS = torch.randint(0, 96, (40,), generator=torch.Generator().manual_seed(4))
SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
LAYER = "model.layers.1."


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tiny(**fields: Any) -> Any:
    return make_hf_model("llama", **(SIZES | {"num_key_value_heads": 2, "initializer_range": 0.1} | fields))


def logits(path: Path, dtype: str = "fp32", **options: Any) -> torch.Tensor:
    return Runner(load_decoder(path, dtype, **options)).logits("a", IDS, [40])


def written(tmp_path: Path, form: str, skip: tuple[str, ...] = (), **fields: Any) -> Written:
    return write_checkpoint(tmp_path / form, tiny(**fields), form, skip)


@pytest.mark.parametrize("form", [form for form in FORMATS if form != "gptq-rules"])
def test_logits_are_those_of_the_dequantised_model(tmp_path, form):
    checkpoint = written(tmp_path, form)
    decoder = load_decoder(checkpoint.path, "fp32")
    layer = decoder._layers[1]
    assert isinstance(layer.mlp._gate_up, PackedLinear)
    assert isinstance(layer.attention._qkv, PackedLinear)
    floats = load_decoder(save(checkpoint.dequantized, tmp_path / "floats"), "fp32")
    assert decoder.num_parameters == floats.num_parameters
    ours, expected = (Runner(one).logits("a", IDS, [40]) for one in (decoder, floats))
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    with torch.inference_mode():
        theirs = checkpoint.dequantized(IDS[None]).logits[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("form", ["awq", "gptq-act-order"])
def test_packed_weights_are_what_is_kept(tmp_path, form):
    checkpoint = written(tmp_path, form)
    packed, floats = load_decoder(checkpoint.path, "bf16"), load_decoder(save(tiny(), tmp_path / "floats"), "bf16")
    matrices = 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128)
    unpacked = 2 * (2 * 96 * 64 + 5 * 64)
    assert floats.weight_bytes == 2 * matrices + unpacked
    a_group = 2 * 4 / GROUP  # at most float32 scales and zeros
    assert matrices // 2 + unpacked < packed.weight_bytes < matrices * (0.5 + a_group) + unpacked + 2 * 6 * 4 * 128


@pytest.mark.parametrize("form", ["awq", "gptq", "fp8", "compressed-tensors-asymmetric"])
def test_a_float_layer_among_quantised_ones(tmp_path, form):
    """Neither list nor order tells which: one of q, k and v, and a whole down projection."""
    skip = (f"{LAYER}self_attn.k_proj", f"{LAYER}mlp.down_proj")
    checkpoint = written(tmp_path, form, skip)
    decoder = load_decoder(checkpoint.path, "fp32")
    assert isinstance(decoder._layers[1].attention._qkv, SideBySide)
    assert isinstance(decoder._layers[1].mlp._down, Linear)
    assert isinstance(decoder._layers[0].attention._qkv, PackedLinear)
    expected = logits(save(checkpoint.dequantized, tmp_path / "floats"))
    torch.testing.assert_close(logits(checkpoint.path), expected, rtol=1e-4, atol=1e-4)


def test_layers_of_different_bits_stay_apart(tmp_path):
    checkpoint = written(tmp_path, "gptq-rules")  # 8 bits for v and up
    decoder = load_decoder(checkpoint.path, "fp32")
    assert isinstance(decoder._layers[0].attention._qkv, SideBySide)
    assert isinstance(decoder._layers[0].mlp._gate_up, SideBySide)
    expected = logits(save(checkpoint.dequantized, tmp_path / "floats"))
    torch.testing.assert_close(logits(checkpoint.path), expected, rtol=1e-4, atol=1e-4)


def test_biases_of_the_model_and_zeros_that_it_does_not_have(tmp_path):
    checkpoint = written(tmp_path, "gptq", attention_bias=True)
    expected = logits(save(checkpoint.dequantized, tmp_path / "floats"))
    torch.testing.assert_close(logits(checkpoint.path), expected, rtol=1e-4, atol=1e-4)
    edit(checkpoint.path, {f"{LAYER}mlp.up_proj.bias": torch.zeros(128)})
    torch.testing.assert_close(logits(checkpoint.path), expected, rtol=1e-4, atol=1e-4)
    edit(checkpoint.path, {f"{LAYER}mlp.up_proj.bias": torch.ones(128)})
    with pytest.raises(BatchInferError, match=r"up_proj\.bias has no place"):
        load_decoder(checkpoint.path)


@pytest.mark.parametrize("tied", [True, False])
def test_a_quantised_head(tmp_path, tied):
    checkpoint = write_checkpoint(tmp_path / "a", tiny(tie_word_embeddings=tied), "gptq", lm_head=True)
    decoder = load_decoder(checkpoint.path, "fp32")
    assert isinstance(decoder._lm_head, PackedLinear)
    hidden = torch.randn(5, 64)
    expected = hidden @ checkpoint.weights["lm_head"].T
    torch.testing.assert_close(decoder.compute_logits(hidden), expected, rtol=1e-4, atol=1e-4)


def test_a_copy_of_the_tied_head_is_accepted(tmp_path):
    checkpoint = written(tmp_path, "awq", tie_word_embeddings=True)
    tensors = load_file(checkpoint.path / "model.safetensors")
    edit(checkpoint.path, {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    decoder = load_decoder(checkpoint.path, "fp32")
    assert decoder._lm_head is decoder._embedding


@pytest.mark.parametrize("form", ["awq", "fp8"])
def test_int8_activations_from_quantised_weights(tmp_path, form):
    checkpoint = written(tmp_path, form)
    decoder = load_decoder(checkpoint.path, "fp32", activation_dtype="int8")
    assert isinstance(decoder._layers[1].mlp._gate_up, Int8Linear)
    path = save(checkpoint.dequantized, tmp_path / "floats")
    assert torch.equal(Runner(decoder).logits("a", IDS, [40]), logits(path, activation_dtype="int8"))


@pytest.mark.parametrize("form", ["awq", "fp8"])
def test_float16_checkpoints_run_in_bf16_unless_told(tmp_path, form):
    path = written(tmp_path, form).path
    config = json.loads((path / "config.json").read_text())
    for key in ("dtype", "torch_dtype"):
        config.pop(key, None)
    (path / "config.json").write_text(json.dumps(config | {"torch_dtype": "float16"}))
    lines: list[str] = []
    assert load_decoder(path, report=lines.append).dtype == torch.bfloat16
    assert len(lines) == 1
    assert lines[0].startswith(f"weights: {form}, ")
    assert "activations bf16 (config.json says float16" in lines[0]
    assert load_decoder(path, "fp16").dtype == torch.float16
    options = checkpoint_options(path, ModelConfig())
    assert {name: tuple(option) for name, option in options.items()} == {
        "quantization": (form, "checkpoint"),
        "dtype": ("bf16", "checkpoint"),
    }


def test_activations_past_float16_stay_finite(tmp_path):
    """An MLP whose output passes 65504, as those of models that were trained in bfloat16 do."""
    checkpoint = written(tmp_path, "awq")
    tensors = load_file(checkpoint.path / "model.safetensors")
    edit(checkpoint.path, {f"{LAYER}mlp.{p}.scales": tensors[f"{LAYER}mlp.{p}.scales"] * 60 for p in MLP})
    decoder = load_decoder(checkpoint.path, "bf16")
    seen: list[float] = []
    mlp = decoder._layers[1].mlp
    plain = mlp._down
    mlp._down = lambda x: seen.append(plain(x).abs().max().item()) or plain(x)
    assert Runner(decoder).logits("a", IDS, [40]).isfinite().all()
    assert max(seen) > 65504


MLP = ("gate_proj", "up_proj", "down_proj")


def test_groups_that_a_gpu_does_not_take_are_refused_in_one_line(tmp_path, monkeypatch):
    """Blocks of 48 inputs, packed as on a GPU, which takes runs of 32."""
    from batchinfer.kernels.quantized_linear import gpu_weight

    from batchinfer.models import linear

    path = written(tmp_path, "fp8-blocks").path
    monkeypatch.setattr(linear, "pack_weight", lambda weight, is_gated: gpu_weight.pack_weight(weight))
    with pytest.raises(UsageError) as refused:
        load_decoder(path)
    assert str(refused.value) == (
        f"{path}: model.layers.0.self_attn.q_proj: group_size = 48: on a GPU it must be a multiple of 32, or all "
        "inputs; run it with --device cpu, or quantise the 16-bit model in such groups"
    )


@pytest.mark.parametrize("form", ["awq", "gptq", "compressed-tensors", "fp8", "modelopt"])
def test_naming_the_method_is_a_check(tmp_path, form):
    path = written(tmp_path, form).path
    method = "fp8" if form == "modelopt" else form
    load_decoder(path, quantization=method)
    other = "gptq" if form != "gptq" else "awq"
    for wanted in (other, "none"):
        with pytest.raises(UsageError, match=f"--quantization {wanted}: the checkpoint .* is of {method}"):
            load_decoder(path, quantization=wanted)


def test_floats_are_no_method(tmp_path):
    path = save(tiny(), tmp_path)
    load_decoder(path, quantization="none")
    with pytest.raises(UsageError, match=r"--quantization awq: the checkpoint .* is not quantised"):
        load_decoder(path, quantization="awq")


@pytest.mark.parametrize("name", ["quantize_config.json", "quant_config.json"])
def test_configs_beside_config_json(tmp_path, name):
    checkpoint = written(tmp_path, "gptq" if name == "quantize_config.json" else "awq")
    expected = logits(checkpoint.path)
    config = json.loads((checkpoint.path / "config.json").read_text())
    old = config.pop("quantization_config")
    del old["quant_method"]
    (checkpoint.path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BatchInferError, match="is quantised, but neither"):
        load_decoder(checkpoint.path)
    (checkpoint.path / name).write_text(json.dumps(old))
    assert torch.equal(logits(checkpoint.path), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{LAYER}mlp.up_proj.qzeros": None}, r"there is no tensor model\.layers\.1\.mlp\.up_proj\.qzeros"),
        ({f"{LAYER}mlp.up_proj.extra": torch.zeros(3)}, r"up_proj\.extra has no place"),
        ({f"{LAYER}mlp.up_proj.weight": torch.zeros(128, 64)}, r"up_proj\.weight has no place"),
        ({f"{LAYER}mlp.up_proj.qweight": torch.zeros(2, 2)}, r"up_proj\.qweight is float32 \[2, 2\]"),
        ({"model.norm.weight": torch.zeros(64).to(torch.float8_e4m3fn)}, r"model\.norm\.weight is torch\.float8"),
    ],
)
def test_checkpoints_that_do_not_fit_are_refused(tmp_path, change, message):
    path = written(tmp_path, "awq").path
    edit(path, change)
    with pytest.raises(BatchInferError, match=message) as caught:
        load_decoder(path)
    assert "\n" not in str(caught.value)


def edit(path: Path, change: dict[str, torch.Tensor | None]) -> None:
    tensors = load_file(path / "model.safetensors") | change
    save_file({k: v for k, v in tensors.items() if v is not None}, path / "model.safetensors", {"format": "pt"})
