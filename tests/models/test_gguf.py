"""GGUF files written here with gguf's own writer, against transformers models that hold the same weights."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

from batchinfer.errors import BatchInferError
from batchinfer.models import gguf_weights
from batchinfer.models.gguf_conversion import convert_gguf
from batchinfer.models.gguf_tokenizer import build_tokenizer

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{p}_proj": f"attn_{p}" for p in "qkv"},
    **{f"self_attn.{p}_norm": f"attn_{p}_norm" for p in "qk"},
    **{f"mlp.{p}_proj": f"ffn_{p}" for p in ("gate", "up", "down")},
}
BYTES = list(bytes_to_unicode().values())
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>"]
WORDS = ["12", "123", "he", "ll", "hell", "hello", "Ġt", "Ġth", "Ġthe"]
MERGES = ["1 2", "12 3", "Ġ t", "Ġt h", "Ġth e", "h e", "l l", "he ll", "hell o"]
ODD_TEXTS = [
    "hello the 12345 x1y22",
    "  two  spaces\n\n\ttab \r\n",
    "😀🇹🇭 ภาษาไทย ป๋า",
    "don't I'll WE'RE\x00\x7f",
    "é ñ ﬁ 漢字 ١٢٣",
    "",
]


def make_model(config_class: type[PreTrainedConfig], **options: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = config_class(**{**SIZES, "initializer_range": 0.2, **options})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "bias")):
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)  # the initial ones would hide a wrong name
    return model


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in GGUF_NAMES:
        return f"{GGUF_NAMES[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[part]}.{kind}"


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter writes q and k of the architecture llama."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def byte_level_keys(writer: gguf.GGUFWriter, pre: str, eos: str = "<|im_end|>") -> None:
    tokens = CONTROL + BYTES + WORDS
    tokens += [f"unused{i}" for i in range(SIZES["vocab_size"] - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(CONTROL) + [1] * (len(tokens) - len(CONTROL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(CONTROL.index(eos))
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}{% endfor %}")


def start_writer(path: Path, config: PreTrainedConfig) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if config.model_type != "qwen2":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_license("apache-2.0")
    return writer


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_model(path: Path, model: PreTrainedModel, kind: Kind, skip: str = "", more: Any = None) -> None:
    """Write the model; its own weights become what the file's quantised blocks hold."""
    config = model.config
    writer = start_writer(path, config)
    byte_level_keys(writer, "smollm")
    if more is not None:
        more(writer)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, parameter in model.named_parameters():
        if gguf_name(name) == skip:
            continue
        rows = parameter.detach().numpy()
        stored = kind if rows.ndim > 1 else Kind.F32
        parameter.data = torch.from_numpy(np.array(dequantize(quantize(rows, stored), stored)))
        part = next((part for part in heads if f".{part}." in name), None)
        if part is not None and config.model_type == "llama":
            rows = permute(rows, heads[part])
        writer.add_tensor(gguf_name(name), quantize(rows, stored), raw_dtype=stored)
    finish(writer)


def convert(path: Path) -> Path:
    directory = path.with_suffix("")
    directory.mkdir()
    convert_gguf(path, directory)
    return directory


def logits(model: PreTrainedModel) -> torch.Tensor:
    ids = torch.arange(7, 7 + 24).reshape(1, 24) * 5 % SIZES["vocab_size"]
    with torch.inference_mode():
        return model(ids).logits


CASES = {
    "llama-f32-untied": (LlamaConfig, Kind.F32, {"tie_word_embeddings": False}),
    "llama-f16-tied": (LlamaConfig, Kind.F16, {"tie_word_embeddings": True}),
    "llama-q8-tied": (LlamaConfig, Kind.Q8_0, {"tie_word_embeddings": True}),
    "llama-q4-untied": (LlamaConfig, Kind.Q4_1, {"tie_word_embeddings": False}),
    "llama-biases": (LlamaConfig, Kind.F32, {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": (LlamaConfig, Kind.F32, {"head_dim": 32}),
    "qwen2-f32-untied": (Qwen2Config, Kind.F32, {"tie_word_embeddings": False}),
    "qwen2-q8-tied": (Qwen2Config, Kind.Q8_0, {"tie_word_embeddings": True}),
    "qwen3-q4-tied": (Qwen3Config, Kind.Q4_1, {"tie_word_embeddings": True, "head_dim": 32}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_the_model_written(case: str, tmp_path: Path) -> None:
    config_class, kind, options = CASES[case]
    model = make_model(config_class, **options)
    write_model(tmp_path / "tiny.gguf", model, kind)
    directory = convert(tmp_path / "tiny.gguf")
    loaded = AutoModelForCausalLM.from_pretrained(directory)
    stored = {Kind.F32: torch.float32, Kind.F16: torch.float16}.get(kind, torch.bfloat16)
    assert loaded.dtype == stored
    assert loaded.config.tie_word_embeddings == model.config.tie_word_embeddings
    for parameter in model.parameters():  # not model.to(): that rounds the rotary frequencies too
        parameter.data = parameter.data.to(stored).float()
    loaded = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=0)


def test_config_is_the_model_s(tmp_path: Path) -> None:
    model = make_model(LlamaConfig, tie_word_embeddings=False, rope_parameters={"rope_theta": 123456.0})
    write_model(tmp_path / "tiny.gguf", model, Kind.Q8_0)
    config = AutoConfig.from_pretrained(convert(tmp_path / "tiny.gguf"))
    for name in SIZES:
        assert getattr(config, name) == getattr(model.config, name), name
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 123456.0}
    assert (config.bos_token_id, config.eos_token_id) == (1, 2)


def llama3_factors(factor: float, theta: float, head_dim: int) -> np.ndarray:
    """As llama.cpp's converter computes rope_freqs.weight, one frequency at a time."""
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < 8192 / 4.0:
            factors.append(1.0)
        elif wavelength > 8192 / 1.0:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)


def test_llama3_rope_is_recognised(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = make_model(LlamaConfig, head_dim=64, rope_parameters={"rope_theta": 500000.0, **scaling})
    factors = llama3_factors(32.0, 500000.0, 64)
    assert len(set(factors)) > 3  # both ends and some between
    write_model(tmp_path / "tiny.gguf", model, Kind.F32, more=lambda w: w.add_tensor("rope_freqs.weight", factors))
    loaded = AutoModelForCausalLM.from_pretrained(convert(tmp_path / "tiny.gguf"))
    assert loaded.config.rope_parameters == {"rope_theta": 500000.0, **scaling}
    torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scaled_rope(kind: str, tmp_path: Path) -> None:
    scaling = {"rope_type": kind, "factor": 4.0}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = 1024
    model = make_model(LlamaConfig, rope_parameters={"rope_theta": 10000.0, **scaling})

    def add_keys(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(1024)

    write_model(tmp_path / "tiny.gguf", model, Kind.F32, more=add_keys)
    loaded = AutoModelForCausalLM.from_pretrained(convert(tmp_path / "tiny.gguf"))
    torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=0)


def test_chunks_do_not_change_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "tiny.gguf", make_model(LlamaConfig), Kind.Q4_1)
    whole = convert(tmp_path / "tiny.gguf") / "model.safetensors"
    monkeypatch.setattr(gguf_weights, "_CHUNK_ELEMENTS", 7 * 64)
    (tmp_path / "chunked").mkdir()
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "chunked")
    assert (tmp_path / "chunked" / "model.safetensors").read_bytes() == whole.read_bytes()


def unknown_key(writer: gguf.GGUFWriter) -> None:
    writer.add_sliding_window(512)


def wrong_factors(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("rope_freqs.weight", np.linspace(1, 9, 8, dtype=np.float32))


def extra_tensor(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("blk.0.attn_sinks.weight", np.zeros(4, np.float32))


def extra_bias(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("blk.1.ffn_up.bias", np.zeros(96, np.float32))


def partial_rotary(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_dimension_count(8)


def split_file(writer: gguf.GGUFWriter) -> None:
    writer.add_uint16("split.count", 3)


def dynamic_rope(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (unknown_key, "llama.attention.sliding_window"),
        (wrong_factors, "rope_freqs.weight"),
        (extra_tensor, "attn_sinks"),
        (extra_bias, "up_proj.bias"),
        (partial_rotary, "rope.dimension_count"),
        (split_file, "join"),
        (dynamic_rope, "longrope"),
    ],
)
def test_what_would_change_the_arithmetic_is_refused(more: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_model(path, make_model(LlamaConfig), Kind.F32, more=more)
    with pytest.raises(BatchInferError, match=words) as caught:
        convert(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["blk.1.ffn_up.weight", "output_norm.weight"])
def test_missing_tensor_is_refused(name: str, tmp_path: Path) -> None:
    write_model(tmp_path / "tiny.gguf", make_model(LlamaConfig), Kind.F32, skip=name)
    with pytest.raises(BatchInferError, match="missing"):
        convert(tmp_path / "tiny.gguf")


def test_rows_that_do_not_fit_the_heads_are_refused(tmp_path: Path) -> None:
    def halve(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.0.attn_k.weight", np.zeros((16, 64), np.float32))

    write_model(tmp_path / "tiny.gguf", make_model(LlamaConfig), Kind.F32, skip="blk.0.attn_k.weight", more=halve)
    with pytest.raises(BatchInferError, match=r"attn_k\.weight has 16 rows where the metadata says 32"):
        convert(tmp_path / "tiny.gguf")


def test_type_without_a_reader_is_refused(tmp_path: Path) -> None:
    def integers(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.0.attn_norm.weight", np.ones(64, np.int32))

    write_model(tmp_path / "tiny.gguf", make_model(LlamaConfig), Kind.F32, skip="blk.0.attn_norm.weight", more=integers)
    with pytest.raises(BatchInferError, match="type I32 is not supported"):
        convert(tmp_path / "tiny.gguf")


@pytest.mark.parametrize("damage", ["truncated", "empty", "other"])
def test_unreadable_file_is_one_line(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_model(path, make_model(LlamaConfig), Kind.F32)
    content = {"truncated": path.read_bytes()[:-5000], "empty": b"", "other": b"PK\x03\x04" * 100}[damage]
    path.write_bytes(content)
    with pytest.raises(BatchInferError, match="not a readable GGUF file") as caught:
        convert(path)
    assert "\n" not in str(caught.value)


def test_other_architecture_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "gemma2")
    for name in ("token_embd.weight", "output_norm.weight"):
        writer.add_tensor(name, np.zeros((4, 32), np.float32))
    finish(writer)
    with pytest.raises(BatchInferError, match=r"gemma2.*supported: llama, qwen2, qwen3"):
        convert(tmp_path / "tiny.gguf")


def tokenizer_metadata(pre: str, **more: Any) -> dict[str, Any]:
    tokens = CONTROL + BYTES + WORDS
    keys = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [3] * len(CONTROL) + [1] * (len(tokens) - len(CONTROL)),
        "merges": MERGES,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (keys | more).items()}


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "qwen2"])
@pytest.mark.parametrize("text", ODD_TEXTS)
def test_text_survives_the_round_trip(pre: str, text: str) -> None:
    tokenizer = build_tokenizer(tokenizer_metadata(pre, add_bos_token=False))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["hello", "1", "2", "3", "Ġthe"]),  # each digit alone
        ("gpt-2", ["hello", "123", "Ġthe"]),  # numbers whole
        ("llama-bpe", ["<|im_start|>", "hello", "123", "Ġthe"]),  # three digits, BOS by default
        ("qwen2", ["hello", "1", "2", "3", "Ġthe"]),
    ],
)
def test_each_pre_tokenizer_cuts_in_its_way(pre: str, pieces: list[str]) -> None:
    assert build_tokenizer(tokenizer_metadata(pre)).encode("hello123 the").tokens == pieces


def test_llama3_cuts_numbers_by_three() -> None:
    tokenizer = build_tokenizer(tokenizer_metadata("llama-bpe", add_bos_token=False))
    assert tokenizer.encode("123123").tokens == ["123", "123"]
    assert tokenizer.encode("12123").tokens == [
        "12",
        "1",
        "2",
        "3",
    ]  # 121|23, and 121 and 23 have no merge of their own


def test_llama3_takes_a_whole_word_before_its_merges() -> None:
    metadata = tokenizer_metadata("llama-bpe", add_bos_token=False)
    metadata["tokenizer.ggml.merges"] = [merge for merge in MERGES if merge != "hell o"]
    assert build_tokenizer(metadata).encode("hello").tokens == ["hello"]
    metadata["tokenizer.ggml.pre"] = "gpt-2"
    assert build_tokenizer(metadata).encode("hello").tokens == ["hell", "o"]


def test_only_qwen2_composes_characters() -> None:
    decomposed, composed = "e\u0301", "\u00e9"
    qwen2 = build_tokenizer(tokenizer_metadata("qwen2"))
    assert qwen2.encode(decomposed).ids == qwen2.encode(composed).ids
    smollm = build_tokenizer(tokenizer_metadata("smollm"))
    assert smollm.decode(smollm.encode(decomposed).ids) == decomposed


def test_control_and_user_tokens_stay_whole() -> None:
    metadata = tokenizer_metadata("smollm")
    tokens = metadata["tokenizer.ggml.tokens"]
    metadata["tokenizer.ggml.tokens"] = [*tokens, "<think>"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 4]
    tokenizer = build_tokenizer(metadata)
    ids = tokenizer.encode("<|im_start|>a<think>b<|im_end|>").ids
    assert ids == [1, tokens.index("a"), len(tokens), tokens.index("b"), 2]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<think>b"


def test_both_ends_where_the_file_asks_for_them() -> None:
    tokenizer = build_tokenizer(tokenizer_metadata("qwen2", add_bos_token=True, add_eos_token=True))
    assert tokenizer.encode("he").tokens == ["<|im_start|>", "he", "<|im_end|>"]
    assert tokenizer.encode("he", add_special_tokens=False).tokens == ["he"]


@pytest.mark.parametrize(("key", "value"), [("pre", "somebody-s"), ("model", "bert"), ("pre", None)])
def test_unknown_tokenizers_are_refused(key: str, value: Any) -> None:
    with pytest.raises(BatchInferError, match="supported: "):
        build_tokenizer(tokenizer_metadata("smollm") | {f"tokenizer.ggml.{key}": value})


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [("merges", None, "merges is missing"), ("eos_token_id", 10_000, "eos_token_id is not in the vocabulary")],
)
def test_broken_tokenizer_metadata_is_refused(key: str, value: Any, words: str) -> None:
    metadata = tokenizer_metadata("smollm") | {f"tokenizer.ggml.{key}": value}
    with pytest.raises(BatchInferError, match=words):
        build_tokenizer({key: value for key, value in metadata.items() if value is not None})


def sentencepiece_metadata() -> dict[str, Any]:
    """A vocabulary whose scores do not follow length or order, so that the merge order matters."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3] + [6] * 256
    scores = [0.0] * len(pieces)
    words = ["▁", *"abc", "ab", "bc", "abc", "ca", "▁a", "▁ab", "▁▁", "bca", "cab", "aa", "aab", "▁abc", "ba"]
    pieces += words
    types += [1] * len(words)
    scores += [-float((7 * i) % len(words)) for i in range(len(words))]
    keys = {"model": "llama", "tokens": pieces, "token_type": types, "scores": scores}
    keys |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def naive_sentencepiece(text: str, metadata: dict[str, Any]) -> list[int]:
    """SentencePiece's BPE as defined: join the two neighbours whose union scores best, the leftmost among equals."""
    tokens = metadata["tokenizer.ggml.tokens"]
    score = dict(zip(tokens, metadata["tokenizer.ggml.scores"], strict=True))
    parts = list(("▁" + text).replace(" ", "▁"))
    while True:
        joins = [(score[a + b], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in score]
        if not joins:
            break
        i = -max(joins)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    ids = []
    for part in parts:
        ids += [tokens.index(part)] if part in score else [tokens.index(f"<0x{b:02X}>") for b in part.encode()]
    return ids


def test_sentencepiece_merges_by_score() -> None:
    metadata = sentencepiece_metadata()
    tokenizer = build_tokenizer(metadata)
    random = np.random.default_rng(0)
    for _ in range(300):
        text = "".join(random.choice(list("abc xé😀\n"), size=random.integers(1, 20)))
        assert tokenizer.encode(text, add_special_tokens=False).ids == naive_sentencepiece(text, metadata), text
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_sentencepiece_bos_and_prefix_space() -> None:
    metadata = sentencepiece_metadata()
    assert build_tokenizer(metadata).encode("ab").tokens[0] == "<s>"
    bare = build_tokenizer(metadata | {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_space_prefix": False})
    assert bare.encode("ab").tokens == ["ab"]
    assert bare.decode(bare.encode(" ab").ids) == " ab"


def test_tokenizer_files_load_in_transformers(tmp_path: Path) -> None:
    write_model(tmp_path / "tiny.gguf", make_model(LlamaConfig), Kind.Q8_0)
    directory = convert(tmp_path / "tiny.gguf")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.is_fast
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    raw = Tokenizer.from_file(str(directory / "tokenizer.json"))
    for text in ODD_TEXTS:
        assert tokenizer(text)["input_ids"] == raw.encode(text).ids
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "he"}], tokenize=False)
    assert chat == "<|im_start|>he"
    assert len(tokenizer) == SIZES["vocab_size"]


@pytest.mark.parametrize(
    ("pre", "eos", "expected"),
    [("smollm", "<|im_end|>", 2), ("llama-bpe", "<|endoftext|>", [0, 3]), ("qwen2", "<|im_end|>", [2, 0])],
)
def test_all_tokens_that_end_an_answer(pre: str, eos: str, expected: Any, tmp_path: Path) -> None:
    """Chat models end a turn by another token than a text: generation_config lists both, GGUF names one."""
    model = make_model(LlamaConfig)
    writer = start_writer(tmp_path / "tiny.gguf", model.config)
    byte_level_keys(writer, pre, eos)
    writer.add_float32("general.sampling.temp", 0.7)
    writer.add_int32("general.sampling.top_k", 20)
    for name, parameter in model.named_parameters():
        writer.add_tensor(gguf_name(name), parameter.detach().numpy())
    finish(writer)
    config = json.loads((convert(tmp_path / "tiny.gguf") / "generation_config.json").read_text())
    assert config["eos_token_id"] == expected
    assert (config["temperature"], config["top_k"], config["do_sample"]) == (0.7, 20, True)
