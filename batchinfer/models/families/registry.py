"""Which family reads which model_type. Called by loader."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from batchinfer.errors import BatchInferError
from batchinfer.models.config_fields import ConfigFields
from batchinfer.models.families import llama, mistral, qwen2, qwen3
from batchinfer.models.spec import DecoderSpec

FAMILIES: dict[str, Callable[[ConfigFields], DecoderSpec]] = {
    "llama": llama.parse,
    "mistral": mistral.parse,
    "qwen2": qwen2.parse,
    "qwen3": qwen3.parse,
}


def parse_config(config: Mapping[str, Any], where: str, allowed: Collection[str] = ()) -> DecoderSpec:
    """The spec of a config.json. Raises BatchInferError on an unknown family, a bad value or an unknown field.

    where: the file's name, for messages. allowed: unknown fields that are taken to be harmless.
    """
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        raise BatchInferError(
            f"{where}: model_type = {config.get('model_type')!r}: batchinfer runs {', '.join(FAMILIES)}"
        )
    fields = ConfigFields(config, where, allowed)
    spec = family(fields)
    fields.finish()
    return spec
