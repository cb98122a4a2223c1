"""Rotary embeddings and their configuration against transformers' own (cosines and sines up to position 60,000)."""

import pytest
import torch

from batchinfer.errors import BatchInferError
from batchinfer.models.config_fields import ConfigFields
from batchinfer.models.rope import RotaryEmbedding
from batchinfer.models.rope_config import parse_rope

POSITIONS = [0, 1000, 8000, 60000]
HALF = [1.0 + i / 10 for i in range(32)]
LONGROPE = {"rope_type": "longrope", "short_factor": HALF, "long_factor": [3 * f for f in HALF]}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
PARAMETERS = [
    {"rope_type": "default", "rope_theta": 500000.0},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    YARN,
    YARN | {"beta_fast": 16, "beta_slow": 2, "truncate": False},
    YARN | {"mscale": 0.7, "mscale_all_dim": 1.2},
    YARN | {"attention_factor": 1.3},
    LONGROPE | {"original_max_position_embeddings": 1024},
    LONGROPE | {"original_max_position_embeddings": 1024, "factor": 9.0},
    LONGROPE | {"original_max_position_embeddings": 1024, "attention_factor": 1.1},
    LLAMA3 | {"original_max_position_embeddings": 1024, "rope_theta": 500000.0},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 10000.0},
]


def ours(config, positions, head_dim=64, max_position=4096):
    spec = parse_rope(ConfigFields(config, "config.json"), head_dim, max_position)
    return RotaryEmbedding(spec, torch.device("cpu")).cos_sin(torch.tensor(positions)), spec


def hugging_face(parameters, positions, head_dim=64):
    """One forward call a position, as when a sequence has just grown to it."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=head_dim * 4, num_attention_heads=4, max_position_embeddings=4096, rope_parameters=dict(parameters)
    )
    rows = []
    for position in positions:
        cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.tensor([[position]]))
        rows.append(torch.cat((cos[0, 0, : cos.shape[-1] // 2], sin[0, 0, : sin.shape[-1] // 2])))
    return torch.stack(rows)


@pytest.mark.parametrize("parameters", PARAMETERS)
@pytest.mark.parametrize("style", ["rope_parameters", "rope_scaling"])
def test_cosines_and_sines_equal_transformers(parameters, style):
    config = {style: parameters}
    if style == "rope_scaling":
        rest = {k: v for k, v in parameters.items() if k not in ("rope_theta", "rope_type")}
        config = {style: rest | {"type": parameters["rope_type"]}, "rope_theta": parameters.get("rope_theta", 10000.0)}
    result, _ = ours(config, POSITIONS)
    torch.testing.assert_close(result, hugging_face(parameters, POSITIONS), rtol=0, atol=2e-5)


@pytest.mark.parametrize("parameters", PARAMETERS[1:7])
def test_partial_rotary_factor(parameters):
    parameters = parameters | {"partial_rotary_factor": 0.5}
    result, spec = ours({"rope_parameters": parameters}, POSITIONS)
    assert spec.rotary_dim == 32
    torch.testing.assert_close(result, hugging_face(parameters, POSITIONS), rtol=0, atol=2e-5)


def test_dynamic_frequencies_depend_on_the_length_only_beyond_the_model():
    spec = ours({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, [0])[1]
    rope = RotaryEmbedding(spec, torch.device("cpu"))
    positions = torch.tensor([100, 100, 100])
    rows = rope.cos_sin(positions, torch.tensor([101, 4096, 8192]))
    assert torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[1], rows[2])
    frequency = (10000 * (2 * 8192 / 4096 - 1) ** (64 / 62)) ** (-2 / 64)  # bloc97's formula, second pair
    assert rows[2][1].item() == pytest.approx(torch.tensor(100 * frequency).cos().item(), abs=1e-5)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, "'su' is not one of"),
        ({"rope_parameters": {"rope_type": "mrope"}}, "rope_parameters.rope_type"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [1]}}, "rope_scaling.mrope_section"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "by layer type"),
        ({"rope_scaling": LONGROPE | {"long_factor": [1.0]}}, "long_factor: must be a list of 32"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 0.5}}, "high_freq_factor"),
        ({"rope_scaling": "linear"}, "must be an object"),
        ({"rope_theta": "big"}, "rope_theta"),
    ],
)
def test_unknown_or_broken_parameters_are_errors(config, message):
    with pytest.raises(BatchInferError, match=message):
        parse_rope(ConfigFields(config, "config.json"), 64, 4096)
