"""Configurations of real checkpoints, unknown fields, and what a checkpoint must and must not hold."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_hf_model, save

from batchinfer.errors import BatchInferError
from batchinfer.models.families.registry import parse_config
from batchinfer.models.linear import PackedLinear
from batchinfer.models.loader import eos_token_ids, generation_config, load_decoder, load_spec

SMOLLM2 = json.loads("""{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
 "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.0417,
 "intermediate_size": 1536, "is_llama_config": true, "max_position_embeddings": 8192, "mlp_bias": false,
 "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "pad_token_id": 2,
 "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": false, "rope_scaling": null, "rope_theta": 100000,
 "tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers.js_config": {"kv_cache_dtype": {}},
 "transformers_version": "4.42.3", "use_cache": true, "vocab_size": 49152}""")
LLAMA31 = json.loads("""{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
 "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096,
 "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": false,
 "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
 "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0,
 "high_freq_factor": 4.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0,
 "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.42.3", "use_cache": true,
 "vocab_size": 128256}""")
MISTRAL = json.loads("""{"architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
 "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
 "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32,
 "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": null,
 "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.42.0.dev0", "use_cache": true,
 "vocab_size": 32768}""")
QWEN25 = json.loads("""{"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
 "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02,
 "intermediate_size": 18944, "max_position_embeddings": 32768, "max_window_layers": 28, "model_type": "qwen2",
 "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
 "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
 "transformers_version": "4.43.1", "use_cache": true, "use_sliding_window": false, "vocab_size": 152064}""")
QWEN3 = json.loads("""{"architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
 "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
 "initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28,
 "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
 "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null,
 "tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": true,
 "use_sliding_window": false, "vocab_size": 151936}""")


@pytest.mark.parametrize(
    ("config", "head_dim", "rope_kind"),
    [
        (SMOLLM2, 64, "default"),
        (LLAMA31, 128, "llama3"),
        (MISTRAL, 128, "default"),
        (QWEN25, 128, "default"),
        (QWEN3, 128, "default"),
    ],
)
def test_published_configurations_load(config, head_dim, rope_kind):
    spec = parse_config(config, "config.json")
    assert (spec.head_dim, spec.rope.kind, spec.dtype) == (head_dim, rope_kind, "bf16")
    assert set(spec.sliding_windows) == {None}
    assert (spec.qkv_bias, spec.qk_norm) == (spec.family == "qwen2", spec.family == "qwen3")


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_defaults_of_absent_fields_are_those_of_transformers(model_type):
    from transformers import AutoConfig

    spec, theirs = parse_config({"model_type": model_type}, "config.json"), AutoConfig.for_model(model_type)
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert (spec.vocab_size, spec.hidden_size, spec.intermediate_size, spec.num_layers) == (
        theirs.vocab_size,
        theirs.hidden_size,
        theirs.intermediate_size,
        theirs.num_hidden_layers,
    )
    assert (spec.num_q_heads, spec.num_kv_heads, spec.head_dim, spec.rms_norm_eps) == (
        theirs.num_attention_heads,
        theirs.num_key_value_heads,
        head_dim,
        theirs.rms_norm_eps,
    )
    assert spec.max_position_embeddings == theirs.max_position_embeddings
    assert spec.tie_word_embeddings == theirs.tie_word_embeddings
    assert set(spec.sliding_windows) == {theirs.sliding_window if model_type == "mistral" else None}
    assert spec.rope.theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logit_scale": 0.5}, "logit_scale = 0.5"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"residual_multiplier": 0}, "residual_multiplier"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"model_type": "gpt2"}, "model_type = 'gpt2'"),
        ({"num_key_value_heads": 2}, "num_kv_heads = 2"),
        ({"hidden_size": "576"}, "hidden_size"),
        ({"attention_bias": 1}, "attention_bias"),
        ({"torch_dtype": "float64"}, "torch_dtype"),
    ],
)
def test_fields_that_would_change_the_answers_are_errors(change, message):
    with pytest.raises(BatchInferError, match=message):
        parse_config(SMOLLM2 | change, "config.json")


def test_quantisation_config_is_no_field_of_the_model(tmp_path):
    config = SMOLLM2 | {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    assert parse_config(config, "config.json") == parse_config(SMOLLM2, "config.json")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BatchInferError, match=r"config\.json: quantization_config: quant_method = 'bitsandbytes'"):
        load_decoder(tmp_path)


def test_allowed_and_switched_off_fields_load():
    extra = {"logit_scale": 0.5, "some_scaling": None, "other_option": False, "things": {}}
    assert parse_config(SMOLLM2 | extra, "config.json", ["logit_scale"]) == parse_config(SMOLLM2, "config.json")
    with pytest.raises(BatchInferError, match="finetuned"):
        parse_config(SMOLLM2 | {"rope_scaling": {"type": "linear", "factor": 2.0, "finetuned": True}}, "config.json")


@pytest.fixture
def tiny(tmp_path):
    return save(make_hf_model("llama"), tmp_path)


def edit(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "no tensor model.layers.1.mlp.up_proj.weight"),
        (lambda t: t.update({"model.layers.2.x": torch.zeros(1)}), "model.layers.2.x has no place"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(47)}), "model.norm.weight"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(48).int()}), "model.norm.weight"),
        (lambda t: t.pop("lm_head.weight"), "lm_head.weight"),
    ],
)
def test_checkpoint_must_fit_the_model(tiny, change, message):
    edit(tiny, change)
    with pytest.raises(BatchInferError, match=message):
        load_decoder(tiny)


def test_derived_tensors_of_old_checkpoints_are_left_out(tiny):
    edit(tiny, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    assert load_decoder(tiny).dtype == torch.float32


def test_tied_head_is_stored_once_and_a_copy_is_accepted(tmp_path):
    path = save(make_hf_model("llama", tie_word_embeddings=True), tmp_path)
    tied = load_decoder(path)
    assert tied._lm_head is tied._embedding
    edit(path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert load_decoder(path).num_parameters == tied.num_parameters
    edit(path, lambda t: t.update({"lm_head.weight": t["lm_head.weight"] + 1}))
    with pytest.raises(BatchInferError, match="tie_word_embeddings"):
        load_decoder(path)


def test_sharded_checkpoint_equals_the_whole(tmp_path):
    model = make_hf_model("llama")
    whole = load_decoder(save(model, tmp_path / "whole"))
    model.save_pretrained(tmp_path / "parts", max_shard_size="40KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    parts = load_decoder(tmp_path / "parts")
    assert torch.equal(parts._layers[1].mlp._gate_up.weight, whole._layers[1].mlp._gate_up.weight)
    next((tmp_path / "parts").glob("*.safetensors")).unlink()
    with pytest.raises(BatchInferError, match=r"\.safetensors"):
        load_decoder(tmp_path / "parts")


def test_a_single_file_may_have_any_name(tiny):
    (tiny / "model.safetensors").rename(tiny / "gptq_model-4bit-128g.safetensors")
    assert load_decoder(tiny).dtype == torch.float32
    save_file({"a": torch.zeros(1)}, tiny / "other.safetensors")
    with pytest.raises(BatchInferError, match="but 2 other"):
        load_decoder(tiny)


def test_dtype_is_the_checkpoints_own_unless_chosen(tiny):
    config = json.loads((tiny / "config.json").read_text())
    assert load_decoder(tiny, "bf16").dtype == torch.bfloat16
    (tiny / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))
    assert load_decoder(tiny).dtype == torch.float16
    (tiny / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "dtype"}))
    with pytest.raises(BatchInferError, match="dtype"):
        load_decoder(tiny)


def test_end_of_sequence_ids_are_a_union(tmp_path):
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    assert eos_token_ids(tmp_path) == {2}
    assert generation_config(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4], "temperature": 0.6}')
    assert eos_token_ids(tmp_path) == {2, 3, 4}
    assert generation_config(tmp_path)["temperature"] == 0.6


def test_missing_files_are_named(tmp_path):
    with pytest.raises(BatchInferError, match=r"config\.json"):
        load_spec(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    with pytest.raises(BatchInferError, match="only safetensors"):
        load_decoder(tmp_path)


@pytest.mark.parametrize("hidden_size", [96, 90])
def test_a_packed_head_gives_the_embedding_s_rows(tmp_path, hidden_size):
    """Unless its rows are filled up: then the table is kept beside it."""
    model = make_hf_model("llama", tie_word_embeddings=True, hidden_size=hidden_size, head_dim=16)
    decoder = load_decoder(save(model, tmp_path), "bf16")
    if not isinstance(decoder._lm_head, PackedLinear):
        pytest.skip("this machine packs no bf16 weights")
    table = model.model.embed_tokens.weight.detach().to(torch.bfloat16)
    ids = torch.tensor([96, 0, 31, 32, 5, 5])
    assert torch.equal(decoder._embedding.rows(ids), table[ids])
    assert decoder._embedding.rows(ids[:0]).shape == (0, hidden_size)
    assert (decoder._embedding is decoder._lm_head) == (hidden_size % 4 == 0)
    others = sum(p.numel() for p in model.parameters()) - table.numel()
    packed = 128 * -(-hidden_size // 4) * 4  # of 97 rows, whole blocks of 32
    beside = decoder.weight_bytes - 2 * others - 2 * packed  # what layers are filled up with, and the table
    assert beside >= table.nbytes if hidden_size % 4 else 0 <= beside < table.nbytes
