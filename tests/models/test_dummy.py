"""Models of a config.json alone, whose weights are drawn at random."""

import json

import pytest
import torch
from tiny_models import Runner

from batchinfer.errors import UsageError
from batchinfer.models.dummy import DummyCheckpoint
from batchinfer.models.loader import load_decoder, load_scheme, load_spec
from batchinfer.models.resolve import resolve_model
from batchinfer.quantization.tensors import ModuleTensors

CONFIG = {
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": 300,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}


def directory(path, **fields):
    (path / "config.json").write_text(json.dumps(CONFIG | fields))
    return path


FORMS = [
    {},
    {"quantization_config": AWQ},
    {"quantization_config": AWQ, "tie_word_embeddings": True},
    {"attention_bias": True},
    {"model_type": "qwen2"},
    {"model_type": "qwen3", "head_dim": 96},
]


@pytest.mark.parametrize("fields", FORMS)
def test_activations_keep_their_size(tmp_path, fields):
    """The residual adds two blocks' results a layer, each about as large as what a norm lets through."""
    decoder = load_decoder(directory(tmp_path, **fields), load_format="dummy")
    hidden = Runner(decoder, block_size=16).step([("a", torch.arange(100), 0, 100)])[0]
    assert 0.9 < hidden.float().pow(2).mean().sqrt() < 1.1  # after the last norm
    logits = decoder.compute_logits(hidden).float()
    assert logits.isfinite().all()
    assert 0.8 < logits.std() < 1.25


def test_parameters_are_those_of_the_config(tmp_path):
    layer = 256 * (256 + 2 * 128) + 256 * 256 + 3 * 256 * 384 + 2 * 256
    for fields in ({}, {"quantization_config": AWQ}):
        decoder = load_decoder(directory(tmp_path, **fields), load_format="dummy")
        assert decoder.num_parameters == 3 * layer + 256 + 2 * 300 * 256


def test_quantised_weights_have_the_variance_of_plain_ones(tmp_path):
    spec = load_spec(directory(tmp_path, quantization_config=AWQ))
    scheme, cpu = load_scheme(tmp_path), torch.device("cpu")
    source = DummyCheckpoint(spec, scheme, cpu)
    tensors = ModuleTensors(source, "model.layers.1.mlp.down_proj", set(source.names), cpu)
    weight = scheme.read(tensors, 256, 384).dequantize(torch.float32)
    plain = DummyCheckpoint(spec, None, cpu).read("model.layers.1.mlp.down_proj.weight")
    for values in (weight, plain):
        assert values.shape == (256, 384)
        assert values.std() == pytest.approx(384**-0.5, rel=0.05)
        assert abs(values.mean()) < 0.15 * values.std()


def test_tensors_depend_on_their_names_alone(tmp_path):
    spec = load_spec(directory(tmp_path))
    one, two = (DummyCheckpoint(spec, None, torch.device("cpu")) for _ in range(2))
    names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(2)]
    two.read(names[1])
    assert torch.equal(one.read(names[0]), two.read(names[0]))
    assert not torch.equal(one.read(names[0]), one.read(names[1]))


def test_other_formats_are_refused(tmp_path):
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
    with pytest.raises(UsageError, match="makes 16-bit weights and AWQ's gemm layout, not gptq"):
        load_decoder(directory(tmp_path, quantization_config=config), load_format="dummy")


def test_a_config_is_enough_and_needed(tmp_path):
    with pytest.raises(UsageError, match=r"must be a directory with a config\.json"):
        resolve_model(str(tmp_path), load_format="dummy")
    files = resolve_model(str(directory(tmp_path)), load_format="dummy")
    assert "drawn at random" in files.source
    with pytest.raises(UsageError, match="there is no tokenizer"):
        resolve_model(str(tmp_path))
