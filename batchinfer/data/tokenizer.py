"""Text to token ids and back, over a model directory's own tokenizer and chat template. Loaded by executors and the
pipeline; PromptBuilder encodes with it, the engine decodes with it."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from batchinfer.data.detokenizer import IncrementalDetokenizer, TokenBytes, byte_decoder
from batchinfer.data.files import read_option_file
from batchinfer.errors import BatchInferError, ErrorCode, RowError, UsageError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TokenIds = npt.NDArray[np.int32]
_AS_IT_STANDS = ("PreTrainedTokenizerFast", "TokenizersBackend")
_CHARACTERS_A_CALL = 1_000_000  # bounds the memory of encodings, some hundred bytes a token until they are arrays


class Tokenizer:
    """A fast tokenizer with truncation and padding off.

    Completion text keeps the space that begins it, also with SentencePiece vocabularies: it is what the tokens add to
    the prompt's text, as vLLM and the text-generation pipeline of transformers have it. Special tokens leave no text.
    """

    def __init__(self, hf_tokenizer: "PreTrainedTokenizerFast") -> None:
        self._hf = hf_tokenizer
        self._backend = hf_tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        added = self._backend.get_added_tokens_decoder()
        special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        decoder = self._backend.decoder
        to_bytes = byte_decoder(None if decoder is None else json.loads(decoder.__getstate__()))
        self.token_bytes = TokenBytes(self._backend.id_to_token, special_ids, to_bytes)
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        self.bos_token: str | None = hf_tokenizer.bos_token
        self.bos_token_id: int | None = hf_tokenizer.bos_token_id
        self.eos_token_id: int | None = hf_tokenizer.eos_token_id

    @classmethod
    def load(cls, path: Path, chat_template: str | None = None) -> "Tokenizer":
        """The tokenizer of a model directory; opens no socket and runs no code of the model's.

        chat_template: a Jinja file that replaces the model's chat template.
        Raises BatchInferError where there is no tokenizer to load, UsageError for an unreadable chat_template.
        """
        template = None if chat_template is None else read_option_file("--chat-template", chat_template)
        try:
            hf_tokenizer = _load_hf_tokenizer(path)
        except Exception as error:  # a broken file shows as any exception of the libraries that read it
            raise BatchInferError(f"{path}: the tokenizer cannot be loaded: {first_line(error)}") from error
        if template is not None:
            hf_tokenizer.chat_template = template
        return cls(hf_tokenizer)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[TokenIds]:
        """Token ids, int32 [num_tokens], of each text, on all threads.

        add_special_tokens: put around each text what the tokenizer puts there by default (BOS, say). A text that
        begins with the BOS token's text already gets no second BOS.
        """
        encoded = [
            np.array(encoding.ids, dtype=np.int32)
            for chunk in _chunks(texts)
            for encoding in self._backend.encode_batch_fast(chunk, add_special_tokens=add_special_tokens)
        ]
        if add_special_tokens and self.bos_token:
            return [self._without_second_bos(text, ids) for text, ids in zip(texts, encoded, strict=True)]
        return encoded

    def _without_second_bos(self, text: str, ids: TokenIds) -> TokenIds:
        repeated = len(ids) >= 2 and ids[0] == ids[1] == self.bos_token_id
        return ids[1:] if repeated and text.startswith(self.bos_token or "") else ids

    def decode(self, token_ids: Sequence[int], prompt_token_ids: Sequence[int] = ()) -> str:
        """The text that a completion adds to its prompt; see IncrementalDetokenizer for what becomes of characters
        cut in two. Without prompt_token_ids the prompt is taken to end with a whole character."""
        return self.detokenizer(prompt_token_ids).decode(token_ids)

    def detokenizer(self, prompt_token_ids: Sequence[int] = ()) -> IncrementalDetokenizer:
        """For decoding a completion of this prompt token by token."""
        return IncrementalDetokenizer(self.token_bytes, prompt_token_ids)

    def require_chat_template(self) -> None:
        """Raises UsageError where chat messages cannot be rendered: no chat template, or one that is no valid Jinja."""
        try:
            self._hf.get_chat_template()
        except ValueError:
            raise UsageError(
                "the model has no chat template, which chat messages need: give one with --chat-template FILE, "
                "or raw text with --prompt-column or --template"
            ) from None
        with contextlib.suppress(RowError):  # what it makes of messages is each row's matter
            self.apply_chat_template([{"role": "user", "content": "Hello"}])

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt text of a chat, with the opening of the assistant's next message at its end.

        The text holds its special tokens and is tokenised without adding any, as transformers does. A chat that ends
        with the assistant's message is closed and a new assistant message opened. Templates run in a sandbox.
        Raises RowError(TEMPLATE_ERROR), and UsageError for a template that does not compile.
        """
        from jinja2 import TemplateSyntaxError

        try:
            text: Any = self._hf.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
            return str(text)
        except TemplateSyntaxError as error:
            raise UsageError(f"the chat template is not valid Jinja: {error.message} (line {error.lineno})") from error
        except Exception as error:  # whatever the template's own code raises
            raise RowError(ErrorCode.TEMPLATE_ERROR, f"chat template: {error}") from error


def _load_hf_tokenizer(path: Path) -> "PreTrainedTokenizerFast":
    """What AutoTokenizer makes of the directory, so that tokens equal those of transformers: it may rebuild the
    tokenizer by the rules of the class that tokenizer_config.json names. A directory that names no such class has
    tokenizer.json loaded as it stands, which is the same without importing torch's distributed half (1.2 s)."""
    if not path.is_dir():
        raise OSError("no such directory")
    if (path / "tokenizer.json").is_file() and _tokenizer_class(path) in _AS_IT_STANDS:
        from transformers import PreTrainedTokenizerFast

        loaded: Any = PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True)
        return loaded
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} is not a fast tokenizer; save a tokenizer.json beside the model")
    return tokenizer


def _tokenizer_class(path: Path) -> str | None:
    config = path / "tokenizer_config.json"
    return json.loads(config.read_text(encoding="utf-8")).get("tokenizer_class") if config.is_file() else None


def _chunks(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Consecutive texts of at most _CHARACTERS_A_CALL characters together, or a single longer one."""
    start, size = 0, 0
    for position, text in enumerate(texts):
        if size and size + len(text) > _CHARACTERS_A_CALL:
            yield texts[start:position]
            start, size = position, 0
        size += len(text)
    if start < len(texts):
        yield texts[start:]
