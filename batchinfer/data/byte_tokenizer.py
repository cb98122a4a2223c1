"""The stand-in for the tokenizer of a model directory that has none, where weights are drawn at random and no text
means anything. Loaded by executors."""

from collections.abc import Sequence

import numpy as np

from batchinfer.data.detokenizer import TokenBytes
from batchinfer.data.tokenizer import TokenIds, Tokenizer
from batchinfer.errors import UsageError


class ByteTokenizer(Tokenizer):
    """A token is a byte of UTF-8, and ids beyond have no text. Nothing ends a text, and there is no chat template."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.token_bytes = TokenBytes(lambda token_id: chr(token_id), frozenset(), _to_bytes)
        self.bos_token = self.bos_token_id = self.eos_token_id = None

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[TokenIds]:
        """Bytes modulo the vocabulary's size."""
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) % self.vocab_size for text in texts]

    def require_chat_template(self) -> None:
        raise UsageError("the model directory has no tokenizer: give prompts as token ids or raw text")


def _to_bytes(token: str) -> bytes:
    return bytes([ord(token)]) if ord(token) < 256 else b""
