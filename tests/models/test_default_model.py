"""The default model as users get it: its configuration, tokenizer and answers, against what its authors publish."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

pytestmark = pytest.mark.slow  # downloads the model on first use


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2)


def test_configuration_is_the_published_one(smollm2: Path) -> None:
    config = json.loads((smollm2 / "config.json").read_text())
    published = {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rope_theta": 100000,
        "rms_norm_eps": 1e-5,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    assert {name: config[name] for name in published} == published
    generation = json.loads((smollm2 / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def test_special_tokens(tokenizer: Any) -> None:
    assert tokenizer("<|im_start|>user\nhi<|im_end|>\n<|endoftext|>")["input_ids"][0:1] == [1]
    assert [tokenizer(text)["input_ids"] for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")] == [[0], [1], [2]]
    assert tokenizer("")["input_ids"] == []  # no BOS
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)


@settings(deadline=None, max_examples=100)
@given(text=st.text(max_size=60))
def test_text_survives_the_round_trip(tokenizer: Any, text: str) -> None:
    """All but characters with one of the bytes that the published vocabulary has no token for: 13 that never occur in
    UTF-8, six control characters and the first bytes of planes 4 to 11, which are unassigned."""
    known = tokenizer.get_vocab()
    spelling = bytes_to_unicode()
    assume(all(spelling[byte] in known for byte in text.encode()))
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_pre_tokenizer_is_the_published_one(smollm2: Path) -> None:
    """Digits one by one, then GPT-2's way of cutting."""
    published = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False, use_regex=True)])
    made = Tokenizer.from_file(str(smollm2 / "tokenizer.json")).pre_tokenizer
    for text in ("x12 345\n\n  it's 10.5%  été", "ภาษา 2024 😀"):
        assert made.pre_tokenize_str(text) == published.pre_tokenize_str(text)


def test_it_answers(smollm2: Path, tokenizer: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.bfloat16)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0]
    assert tokenizer.decode(output[inputs["input_ids"].shape[1] :]) == "The capital of France is Paris.<|im_end|>"
