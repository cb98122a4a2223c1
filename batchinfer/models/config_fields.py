"""Reads config.json field by field and knows which fields nobody has read: one of those might change the arithmetic, so
it ends the load. Used by families/ and rope_config."""

from collections.abc import Collection, Mapping
from typing import Any

from batchinfer.errors import BatchInferError

# Fields that transformers or training tools write and that have no bearing on the logits, and those of quantised
# checkpoints, which quantization/ reads.
_HARMLESS_NAMES = """
_attn_implementation _attn_implementation_autoset _flash_attn_2_enabled _name_or_path architectures
attention_dropout attn_implementation bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward
compression_config decoder_start_token_id diversity_penalty do_sample early_stopping
encoder_no_repeat_ngram_size eos_token_id
exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id id2label
initializer_range is_decoder is_llama_config label2id length_penalty max_length max_sequence_length min_length
model_type no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions
output_hidden_states output_scores pad_token_id prefix pretraining_tp problem_type
quantization_config remove_invalid_values
repetition_penalty return_dict return_dict_in_generate sep_token_id suppress_tokens task_specific_params
temperature tokenizer_class top_k top_p torchscript transformers.js_config transformers_version typical_p
unsloth_fixed unsloth_version use_bfloat16 use_cache
"""
HARMLESS = frozenset(_HARMLESS_NAMES.split())


class ConfigFields:
    """The fields of one config.json.

    allowed: names that the user vouches for (`--allow-config-fields`).
    """

    def __init__(self, config: Mapping[str, Any], where: str, allowed: Collection[str] = ()) -> None:
        self._config = config
        self._unread = set(config) - HARMLESS - set(allowed)
        self.where = where
        self.allowed = frozenset(allowed)

    def raw(self, name: str, default: Any = None) -> Any:
        """The value as it stands, null included; `default` only where the field is absent."""
        self._unread.discard(name)
        return self._config.get(name, default)

    def integer(self, name: str, default: int) -> int:
        """`default` stands for an absent or null field; BatchInferError on another type, as in the next methods."""
        return int(self._typed(name, default, (int,), "an integer"))

    def optional_integer(self, name: str, default: int | None) -> int | None:
        """None for an explicit null; `default` for an absent field."""
        return None if self.raw(name, default) is None else self.integer(name, default or 0)

    def number(self, name: str, default: float) -> float:
        return float(self._typed(name, default, (int, float), "a number"))

    def boolean(self, name: str, default: bool) -> bool:
        value = self.raw(name)
        if value is not None and not isinstance(value, bool):
            raise self.error(name, "must be true or false")
        return default if value is None else value

    def _typed(self, name: str, default: float, kinds: tuple[type[int] | type[float], ...], allowed: str) -> float:
        value: Any = self.raw(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise self.error(name, f"must be {allowed}")
        return value

    def error(self, name: str, problem: str) -> BatchInferError:
        return BatchInferError(f"{self.where}: {name} = {self._config.get(name)!r} {problem}")

    def invalid(self, problem: str) -> BatchInferError:
        return BatchInferError(f"{self.where}: {problem}")

    def finish(self) -> None:
        """Raises BatchInferError on a field that was not read and does not say "off" (null, false or empty)."""
        for name in sorted(self._unread):
            value = self._config[name]
            if value is not None and value is not False and value not in ([], {}, ""):
                raise self.error(
                    name,
                    "is not a field that batchinfer knows for this model, and it may change the answers; "
                    f"if it does not, pass --allow-config-fields {name}",
                )
