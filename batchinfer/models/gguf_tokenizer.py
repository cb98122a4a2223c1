"""The tokenizer inside a GGUF file to tokenizer.json and tokenizer_config.json: byte-level BPE ("gpt2") and
SentencePiece BPE ("llama"). Called by models/gguf_conversion.py."""

import json
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchinfer.errors import BatchInferError

if TYPE_CHECKING:
    import tokenizers

_KEY = "tokenizer.ggml."
_SPACE = "\u2581"  # SentencePiece's visible space
# How the text is cut before merging; from the tokenizer.json files of Llama 3 and Qwen2.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_REQUIRED = {"gpt2": ("tokens", "token_type", "merges"), "llama": ("tokens", "token_type", "scores")}
_BYTE_LEVEL_KINDS = ("gpt-2", "smollm", "llama-bpe", "qwen2")


class TokenType(IntEnum):
    """Values of tokenizer.ggml.token_type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def check_tokenizer(metadata: Mapping[str, Any]) -> None:
    """Raises BatchInferError where the file has no tokenizer that can be rebuilt."""
    model = metadata.get(_KEY + "model")
    if model not in _REQUIRED:
        raise BatchInferError(f"tokenizer model {model!r} is not supported; supported: {', '.join(_REQUIRED)}")
    if missing := [key for key in _REQUIRED[model] if _KEY + key not in metadata]:
        raise BatchInferError(f"the key {_KEY}{missing[0]} is missing")
    for key in ("bos", "eos", "eot", "eom", "unknown", "padding"):
        if metadata.get(f"{_KEY}{key}_token_id", 0) >= len(metadata[_KEY + "tokens"]):
            raise BatchInferError(f"{_KEY}{key}_token_id is not in the vocabulary")


def control_tokens(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Control tokens by text, to their ids."""
    tokens, types = metadata[_KEY + "tokens"], metadata[_KEY + "token_type"]
    return {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind == TokenType.CONTROL}


def write_tokenizer(metadata: Mapping[str, Any], directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, which transformers loads as a fast tokenizer.

    Raises BatchInferError for a tokenizer model or pre-tokenizer that is not known: another way to cut the text gives
    other token ids, and a model that answers badly without a message.
    """
    tokenizer = build_tokenizer(metadata)
    tokenizer.save(str(directory / "tokenizer.json"))
    tokens = metadata[_KEY + "tokens"]
    config: dict[str, Any] = {
        # Loads tokenizer.json as it is; a class named after the model would rebuild another pre-tokenizer.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata[f"{metadata['general.architecture']}.context_length"],
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (token_id := metadata.get(f"{_KEY}{key}_token_id")) is not None:
            config[f"{name}_token"] = tokens[token_id]
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    text = json.dumps(config, ensure_ascii=False, indent=2)
    (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def build_tokenizer(metadata: Mapping[str, Any]) -> "tokenizers.Tokenizer":
    """The tokenizer of a GGUF file's metadata, its control and user-defined tokens added as whole tokens."""
    check_tokenizer(metadata)
    is_byte_level = metadata[_KEY + "model"] == "gpt2"
    tokenizer = _byte_level_bpe(metadata) if is_byte_level else _sentencepiece_bpe(metadata)
    _add_whole_tokens(tokenizer, metadata)
    _add_ends(tokenizer, metadata)
    return tokenizer


def _byte_level_bpe(metadata: Mapping[str, Any]) -> "tokenizers.Tokenizer":
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    kind = metadata.get(_KEY + "pre")
    if kind not in _BYTE_LEVEL_KINDS:
        raise BatchInferError(f"pre-tokenizer {kind!r} is not supported; supported: {', '.join(_BYTE_LEVEL_KINDS)}")
    vocab = {token: i for i, token in enumerate(metadata[_KEY + "tokens"])}
    merges = [_pair(merge) for merge in metadata[_KEY + "merges"]]
    # Llama 3 takes a word that is a token as that token, whatever the merges say.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=kind == "llama-bpe"))
    split = {"llama-bpe": _LLAMA3_SPLIT, "qwen2": _QWEN2_SPLIT}.get(kind)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    steps: list[Any] = [byte_level]
    if split is not None:
        steps.insert(0, pre_tokenizers.Split(Regex(split), behavior="isolated"))
    elif kind == "smollm":
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _sentencepiece_bpe(metadata: Mapping[str, Any]) -> "tokenizers.Tokenizer":
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens = metadata[_KEY + "tokens"]
    unknown = tokens[metadata.get(_KEY + "unknown_token_id", 0)]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=_merges_from_scores(metadata),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    to_visible: list[Any] = [normalizers.Replace(" ", _SPACE)]
    to_text: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get(_KEY + "add_space_prefix", True):
        to_visible.insert(0, normalizers.Prepend(_SPACE))
        to_text.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(to_visible)
    tokenizer.decoder = decoders.Sequence(to_text)
    return tokenizer


def _merges_from_scores(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """SentencePiece merges the two neighbours whose union has the best score; so every split of a piece into two pieces
    is a merge of that piece's rank. Among equals the piece with the lower id comes first."""
    tokens, types = metadata[_KEY + "tokens"], metadata[_KEY + "token_type"]
    mergeable = {
        token: (-score, i)
        for i, (token, score, kind) in enumerate(zip(tokens, metadata[_KEY + "scores"], types, strict=True))
        if kind in (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)
    }
    merges: list[tuple[str, str]] = []
    for token in sorted(mergeable, key=mergeable.__getitem__):
        pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        merges += (pair for pair in pairs if pair[0] in mergeable and pair[1] in mergeable)
    return merges


def _add_whole_tokens(tokenizer: "tokenizers.Tokenizer", metadata: Mapping[str, Any]) -> None:
    from tokenizers import AddedToken

    added = [
        AddedToken(token, normalized=False, special=kind != TokenType.USER_DEFINED)
        for token, kind in zip(metadata[_KEY + "tokens"], metadata[_KEY + "token_type"], strict=True)
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
    ]
    tokenizer.add_tokens(added)


def _add_ends(tokenizer: "tokenizers.Tokenizer", metadata: Mapping[str, Any]) -> None:
    """BOS before and EOS after the text where the file asks for it; SentencePiece and Llama 3 files that are silent
    about it mean BOS."""
    from tokenizers import processors

    default = metadata[_KEY + "model"] == "llama" or metadata.get(_KEY + "pre") == "llama-bpe"
    has_bos = metadata.get(_KEY + "add_bos_token", default) and _KEY + "bos_token_id" in metadata
    ends = {"bos": has_bos, "eos": metadata.get(_KEY + "add_eos_token", False)}
    ids = {name: metadata[f"{_KEY}{name}_token_id"] for name, wanted in ends.items() if wanted}
    if not ids:
        return
    special = [(metadata[_KEY + "tokens"][token_id], token_id) for token_id in dict.fromkeys(ids.values())]
    text = {name: metadata[_KEY + "tokens"][token_id] for name, token_id in ids.items()}
    single = [part for part in (text.get("bos"), "$A", text.get("eos")) if part]
    pair = [*single, *("$B:1" if part == "$A" else f"{part}:1" for part in single)]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)
