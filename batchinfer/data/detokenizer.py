"""Token ids to text, as bytes: what each token adds, and the UTF-8 decoding of a completion that follows a prompt.
Made by Tokenizer; used by the engine once at the end, or token by token where stop strings ask for it."""

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from batchinfer.errors import BatchInferError

_LONGEST_INCOMPLETE = 3  # bytes of a UTF-8 character that still lacks one


class TokenBytes(dict[int, bytes]):
    """Bytes that each token id adds to the text; empty for special tokens and for ids without a token.

    Filled at first use, as a whole vocabulary takes a third of a second.
    """

    def __init__(
        self, id_to_token: Callable[[int], str | None], special_ids: frozenset[int], to_bytes: Callable[[str], bytes]
    ) -> None:
        super().__init__()
        self._id_to_token = id_to_token
        self._special_ids = special_ids
        self._to_bytes = to_bytes

    def __missing__(self, token_id: int) -> bytes:
        token = None if token_id in self._special_ids else self._id_to_token(int(token_id))
        self[int(token_id)] = data = b"" if token is None else self._to_bytes(token)
        return data


class IncrementalDetokenizer:
    """The text of a completion, token by token; the pieces joined equal `decode` of all its tokens at once.

    Bytes of an unfinished character are held back until it is whole, proves invalid or the completion ends; then they
    are U+FFFD, as any invalid bytes. Of the prompt's text nothing is repeated: where the prompt ends in the middle of
    a character that the completion finishes, the completion has the whole character (the prompt's text has none of
    it); where the completion does not finish it, the prompt's loose bytes are left out.
    """

    def __init__(self, token_bytes: TokenBytes, prompt_token_ids: Sequence[int] = ()) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._prompt_bytes = _incomplete_end(token_bytes, prompt_token_ids)

    def add(self, token_id: int) -> str:
        """The text that this token completes, which may be empty."""
        return self._feed(self._token_bytes[token_id])

    def finish(self) -> str:
        """What was held back, at the end of the completion."""
        return self._decoder.decode(b"", final=True)

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of a whole completion; for a fresh object."""
        return self._feed(b"".join(map(self._token_bytes.__getitem__, token_ids))) + self.finish()

    def _feed(self, data: bytes) -> str:
        if self._prompt_bytes and data:
            if _continues(self._prompt_bytes, data[0]):
                self._decoder.decode(self._prompt_bytes)
            self._prompt_bytes = b""
        return self._decoder.decode(data)


def _incomplete_end(token_bytes: TokenBytes, token_ids: Sequence[int]) -> bytes:
    """The bytes at the end of the tokens that begin a character without finishing it."""
    end = b""
    for token_id in reversed(token_ids):
        end = token_bytes[token_id] + end
        if len(end) >= _LONGEST_INCOMPLETE:
            break
    for length in range(1, min(_LONGEST_INCOMPLETE, len(end)) + 1):
        if end[-length] >= 0xC0:  # the last byte that begins a character of several
            return end[-length:] if _begins_a_character(end[-length:]) else b""
    return b""


def _continues(incomplete: bytes, byte: int) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")("strict").decode(incomplete + bytes([byte]))
    except UnicodeDecodeError:
        return False
    return True


def _begins_a_character(data: bytes) -> bool:
    """Whether valid UTF-8 may go on after these bytes, and they hold no whole character."""
    try:
        return codecs.getincrementaldecoder("utf-8")("strict").decode(data) == ""
    except UnicodeDecodeError:
        return False


def byte_decoder(decoder: Mapping[str, Any] | None) -> Callable[[str], bytes]:
    """What turns a token's text in the vocabulary into its bytes, from the decoder section of a tokenizer.json.

    Covers byte-level BPE, and the SentencePiece conversions with byte fallback. The space that those strip at the
    start of a text stays, as a completion follows its prompt. Raises BatchInferError for another decoder.
    """
    steps = [_step(step) for step in _flatten(decoder)]

    def to_bytes(token: str) -> bytes:
        value: str | bytes = token
        for step in steps:
            if isinstance(value, str):
                value = step(value)
        return value.encode("utf-8", "replace") if isinstance(value, str) else value

    return to_bytes


def _flatten(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        raise BatchInferError("tokenizer.json has no decoder; batchinfer cannot turn its tokens into text")
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _step(decoder: Mapping[str, Any]) -> Callable[[str], str | bytes]:
    kind = decoder["type"]
    if kind == "ByteLevel":
        return _from_byte_level
    if kind == "ByteFallback":
        return _from_byte_fallback
    if kind == "Metaspace":
        return lambda token: token.replace(decoder["replacement"], " ")
    if kind == "Replace" and "String" in decoder["pattern"]:
        return lambda token: token.replace(decoder["pattern"]["String"], decoder["content"])
    if kind == "Fuse" or (kind == "Strip" and decoder["stop"] == 0):
        return lambda token: token  # joins tokens, or strips the start of the whole text
    raise BatchInferError(
        f"tokenizer.json has a decoder {kind!r} that batchinfer does not know; "
        "known: ByteLevel, ByteFallback, Metaspace, Replace, Fuse, Strip"
    )


def _from_byte_fallback(token: str) -> str | bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token


def _byte_level_alphabet() -> dict[str, int]:
    """Character to byte: GPT-2's table (openai/gpt-2, encoder.py), which gives each byte a printable character."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()


def _from_byte_level(token: str) -> str | bytes:
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token  # an added token, which stands in the vocabulary as plain text
