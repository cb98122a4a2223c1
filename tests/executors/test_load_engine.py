"""An engine loaded from a model directory: sizes, ends of sequence, refusals."""

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from batchinfer.config import JobConfig
from batchinfer.errors import UsageError
from batchinfer.executors.local import LocalEngine, load_engine
from batchinfer.models.resolve import ModelFiles
from batchinfer.request import Request, RequestId, SamplingParams

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
CONFIG_EOS, GENERATION_EOS, TOKENIZER_EOS = 256, (257, 258), 259


@pytest.fixture(autouse=True)
def keep_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> ModelFiles:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=CONFIG_EOS,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=list(GENERATION_EOS))
    model.save_pretrained(path)
    tokenizer = Tokenizer(models.BPE(vocab={b: i for i, b in enumerate(BYTES)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(f"<{i}>", special=True) for i in range(256, 260)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<259>").save_pretrained(path)
    return ModelFiles(path, "a random model", None, "")


def load(files: ModelFiles, **options) -> tuple[LocalEngine, list[str]]:
    lines: list[str] = []
    config = JobConfig.from_options({"device": "cpu", "threads": 1, "kv_cache_memory": 1 << 20, **options})
    return load_engine(config, files, lines.append), lines


def test_sizes_and_what_is_said(files):
    local, lines = load(files, kv_cache_dtype="fp8", max_num_seqs=5)
    per_block = 16 * 2 * 2 * 2 * (8 + 4)  # tokens, keys and values, layers, heads, a byte an element and a scale
    assert local.kv_cache_bytes == 5 * (128 // 16) * per_block
    assert (local.engine.max_model_len, local.engine.vocab_size, local.device) == (128, 260, "cpu")
    assert lines[0] == "max_model_len: 128 (the model's)"
    assert "640 tokens in 40 blocks" in lines[1]
    assert "fp8 holds 1.33 times as many tokens as 16 bits" in lines[1]
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("eos", [CONFIG_EOS, *GENERATION_EOS, TOKENIZER_EOS])
def test_every_end_that_a_file_names_ends_a_row(files, eos):
    engine = load(files)[0].engine
    params = SamplingParams(temperature=0, max_tokens=9, logit_bias=((eos, 1e6),))
    engine.add(Request(RequestId(0, 0), np.array([5, 6], np.int32), params, 9, 0))
    (result,) = [r for _ in range(3) if engine.has_unfinished for r in engine.step()]
    assert (result.finish_reason, result.stop_reason, result.token_ids, result.text) == ("stop", None, [eos], "")


def test_a_max_model_len_beyond_the_cache_is_refused(files):
    with pytest.raises(UsageError, match="--max-model-len 100 does not fit the KV cache"):
        load(files, max_model_len=100, kv_cache_memory=20_000)


def test_a_gpu_that_is_not_there_is_refused(files, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="--device cuda"):
        load(files, device="cuda")


def test_requests_that_have_not_started_can_be_dropped(files):
    engine = load(files, max_num_seqs=2)[0].engine
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    for row in range(6):
        engine.add(Request(RequestId(0, row), np.array([row], np.int32), params, 5, 0))
    results = engine.step()
    engine.drop_unstarted()
    while engine.has_unfinished:
        results += engine.step()
    assert {r.id.row for r in results} == {0, 1}
    assert all(len(r.token_ids) == 5 for r in results)
