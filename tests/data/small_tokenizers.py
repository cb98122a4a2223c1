"""Tokenizers whose ids can be worked out by hand, saved as model directories.

byte level: id = SHIFT + byte, no merges, but for EURO_START (the first two of the three bytes of the euro sign).
SentencePiece-like: byte fallback, characters a-z and the space mark as tokens, "▁hi" merged.
"""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

BOS, EOS, HEADER, SHIFT = 0, 1, 2, 3
EURO_START = SHIFT + 256
VOCAB_SIZE = SHIFT + 257

LLAMA3_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|header|>{{ message.role }}\n{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|header|>assistant\n{% endif %}"
)
MISTRAL_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% if message.role == 'user' %}[INST] {{ message.content }} [/INST]{% else %}{{ message.content }}{% endif %}"
    "{% endfor %}"
)


def ids_of(text: str) -> list[int]:
    """Byte-level ids of a text without special tokens."""
    return [SHIFT + byte for byte in text.encode()]


def save_byte_level(path: Path, adds_bos: bool = True, chat_template: str | None = None) -> Path:
    character = bytes_to_unicode()
    vocab = {"<|begin|>": BOS, "<|end|>": EOS, "<|header|>": HEADER}
    vocab |= {character[byte]: SHIFT + byte for byte in range(256)}
    vocab[character[0xE2] + character[0x82]] = EURO_START
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", special_tokens=[("<|begin|>", BOS)]
        )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token="<|end|>", additional_special_tokens=["<|header|>"]
    )
    wrapped.chat_template = chat_template
    wrapped.save_pretrained(path)
    return path


def save_sentencepiece_like(path: Path) -> Path:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", *"abcdefghijklmnopqrstuvwxyz", "hi", "▁hi"]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [("h", "i"), ("▁", "hi")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    wrapped.save_pretrained(path)
    return path
