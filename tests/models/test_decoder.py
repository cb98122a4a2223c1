"""The decoder against Hugging Face on tiny random models: families, rope kinds, odd heads, windows, and any cut of the
sequences into chunks."""

import math

import pytest
import torch
from tiny_models import Runner, make_hf_model, save

from batchinfer.models.linear import Linear
from batchinfer.models.loader import load_decoder

FAMILY_FIELDS = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 6}),
    ("llama", {"head_dim": 20, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"}),
    ("llama", {"num_attention_heads": 1, "num_key_value_heads": 1, "hidden_act": "gelu"}),
    ("mistral", {"sliding_window": 5}),
    ("mistral", {"sliding_window": None, "head_dim": 10}),
    ("qwen2", {"num_attention_heads": 8, "num_key_value_heads": 1}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    ("qwen3", {"head_dim": 16}),
    (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]},
    ),
]
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1000.0},
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.5, 2.0, 3.0, 4.0],
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
        "rope_theta": 10000.0,
    },
}


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def hf_logits(model, ids):
    with torch.no_grad():
        return model(ids[None]).logits[0]


def random_ids(count, seed=0):
    return torch.randint(0, 97, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("model_type", "fields"), FAMILY_FIELDS)
def test_families_equal_hugging_face(tmp_path, model_type, fields):
    model = make_hf_model(model_type, **fields)
    decoder = load_decoder(save(model, tmp_path), "fp32")
    a, b = random_ids(30, 1), random_ids(21, 2)
    runner = Runner(decoder)
    first = runner.step([("a", a, 0, 13), ("b", b, 0, 20)])
    second = runner.step([("b", b, 20, 21), ("a", a, 13, 14)])
    third = runner.step([("a", a, 14, 30)])
    ours_a = decoder.compute_logits(torch.cat((first[0], second[1], third[0])))
    ours_b = decoder.compute_logits(torch.cat((first[1], second[0])))
    torch.testing.assert_close(ours_a, hf_logits(model, a), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(ours_b, hf_logits(model, b), rtol=1e-5, atol=1e-4)
    assert decoder.num_parameters == sum(p.numel() for p in model.parameters())
    assert decoder.weight_bytes == 4 * decoder.num_parameters


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", ROPES)
def test_rope_kinds_equal_hugging_face(tmp_path, model_type, kind):
    model = make_hf_model(model_type, head_dim=8, rope_parameters=dict(ROPES[kind]))
    decoder = load_decoder(save(model, tmp_path), "fp32")
    for length, prompt_lens in ((10, None), (50, None), (100, torch.tensor([100]))):
        ids = random_ids(length)
        cuts = [length] if prompt_lens is None else [7, 40, length]
        ours = Runner(decoder).logits("a", ids, cuts, prompt_lens=prompt_lens)
        torch.testing.assert_close(ours, hf_logits(model, ids), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_growth_past_the_rope_threshold_equals_generate(tmp_path, kind):
    """A later token takes the frequencies of the length it makes, keys keep theirs: what transformers' cache does."""
    model = make_hf_model("llama", rope_parameters=dict(ROPES[kind]))
    decoder = load_decoder(save(model, tmp_path), "fp32")
    prompt = random_ids(60 if kind == "dynamic" else 14)
    with torch.no_grad():
        generated = model.generate(
            prompt[None],
            attention_mask=torch.ones_like(prompt[None]),
            max_new_tokens=20,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=0,
        )
    ids = generated.sequences[0]
    expected = torch.cat(generated.logits)
    cuts = [5, *range(len(prompt), len(ids) + 1)]
    ours = Runner(decoder).logits("a", ids, cuts, prompt_lens=torch.tensor([len(prompt)]))
    torch.testing.assert_close(ours[len(prompt) - 1 : -1], expected, rtol=1e-5, atol=1e-4)
    recomputed = Runner(decoder).logits("a", ids, [30, len(ids)], prompt_lens=torch.tensor([len(prompt)]))
    assert torch.equal(recomputed, ours)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_logits_are_bitwise_independent_of_chunks_and_batch(tmp_path, dtype, kv_dtype, threads):
    torch.set_num_threads(threads)
    model = make_hf_model("llama", hidden_size=96, head_dim=16, intermediate_size=64)
    decoder = load_decoder(save(model, tmp_path), dtype)
    ids, others = random_ids(60), [random_ids(40, seed) for seed in range(5)]
    whole = Runner(decoder, kv_dtype).logits("a", ids, [60])
    assert torch.equal(Runner(decoder, kv_dtype, block_size=16).logits("a", ids, [1, 2, 33, 59, 60]), whole)
    runner, parts = Runner(decoder, kv_dtype), []
    for start, end in [(0, 10), (10, 11), (11, 12), (12, 60)]:
        beside = [(f"{start}-{i}", other, 0, 5 * i + 1) for i, other in enumerate(others)]
        parts.append(runner.step([*beside, ("a", ids, start, end)])[-1])
    assert torch.equal(decoder.compute_logits(torch.cat(parts)), whole)
    assert torch.equal(decoder.compute_logits(parts[1]), whole[10:11])


def test_bf16_logits_are_close_to_hugging_face(tmp_path):
    model = make_hf_model("qwen3", head_dim=16)
    ids = random_ids(50)
    exact = hf_logits(model, ids)
    decoder = load_decoder(save(model, tmp_path), "bf16")
    ours = Runner(decoder).logits("a", ids, [50])
    theirs = hf_logits(model.bfloat16(), ids).float()
    assert decoder.dtype == torch.bfloat16
    assert (ours - exact).square().mean() <= 1.2 * (theirs - exact).square().mean()


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8", "fp8_e5m2", "bf16", "fp16"])
def test_small_kv_dtypes_stay_close(tmp_path, kv_dtype):
    model = make_hf_model("llama", head_dim=16)
    decoder = load_decoder(save(model, tmp_path), "fp32")
    ids = random_ids(50)
    exact = hf_logits(model, ids)
    error = (Runner(decoder, kv_dtype).logits("a", ids, [20, 50]) - exact).std() / exact.std()
    assert 0 < error < {"fp8": 0.2, "int8": 0.05, "fp8_e5m2": 0.4, "bf16": 0.02, "fp16": 0.005}[kv_dtype]


def test_a_fault_in_one_sequence_does_not_reach_its_neighbours(tmp_path):
    model = make_hf_model("llama")
    decoder = load_decoder(save(model, tmp_path), "fp32")
    decoder._embedding.weight[96] = math.nan
    good, bad = random_ids(20) % 96, random_ids(20, 1) % 96
    bad[11] = 96
    alone = Runner(decoder).step([("good", good, 0, 20)])[0]
    runner = Runner(decoder)
    hidden_bad, hidden_good = runner.step([("bad", bad, 0, 20), ("good", good, 0, 20)])
    assert torch.equal(hidden_good, alone)
    assert hidden_bad[11:].isnan().any(-1).all()


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_rows_do_not_depend_on_their_number(dtype, threads):
    torch.set_num_threads(threads)
    linear = Linear(torch.randn(192, 576).to(dtype), torch.randn(192).to(dtype))
    x = torch.randn(64, 576).to(dtype)
    whole = linear(x)
    for count in range(1, 20):
        assert torch.equal(linear(x[:count]), whole[:count])
