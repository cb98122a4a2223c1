"""The sampling parameters of rows that carry none, with where each value comes from. Used by the pipeline, which logs
and stores the sources, and by LLM."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal

from batchinfer.config import SamplingConfig
from batchinfer.errors import UsageError
from batchinfer.request import SamplingParams
from batchinfer.sampling_config import parse_logit_bias

ParamSource = Literal["flag", "generation_config", "default"]

# Fields of generation_config.json that are taken, as in vLLM.
_GENERATION_FIELDS: Mapping[str, tuple[str, type]] = {
    "temperature": ("temperature", float),
    "top_p": ("top_p", float),
    "top_k": ("top_k", int),
    "min_p": ("min_p", float),
    "repetition_penalty": ("repetition_penalty", float),
    "max_tokens": ("max_new_tokens", int),
}


def resolve_sampling(
    sampling: SamplingConfig, generation_config: Mapping[str, Any]
) -> tuple[SamplingParams, dict[str, ParamSource]]:
    """Defaults for rows, and the source of each by its SamplingParams name.

    Precedence: flag (or job file), the model's generation_config.json, SamplingParams' default. Of generation_config
    the fields that vLLM takes count: temperature, top_p, top_k, min_p, repetition_penalty and max_new_tokens (as
    max_tokens); `do_sample` and `max_length` do not, so that without a temperature anywhere it is 1.0. max_tokens set
    nowhere is the room left. `seed` is not among them: the job's is SamplingConfig's, a row's own comes with the row.
    Raises UsageError naming the field and what is allowed.
    """
    given: dict[str, Any] = {}
    sources: dict[str, ParamSource] = {}
    for name in (f.name for f in fields(SamplingParams) if f.name != "seed"):
        flag, (key, kind) = getattr(sampling, name), _GENERATION_FIELDS.get(name, ("", str))
        sources[name] = "default"
        if flag is not None:
            given[name] = parse_logit_bias(flag) if name == "logit_bias" else flag
            sources[name] = "flag"
        elif generation_config.get(key) is not None:
            given[name] = _generation_value(key, generation_config[key], kind)
            sources[name] = "generation_config"
    try:
        return SamplingParams(**given), sources
    except ValueError as error:
        raise UsageError(f"{error} (from {_origin(str(error), sources)})") from None


def _generation_value(key: str, value: Any, kind: type) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or kind(value) != value:
        allowed = "an integer" if kind is int else "a number"
        raise UsageError(f"generation_config.json: {key} = {value!r}: must be {allowed}")
    return kind(value)


def _origin(message: str, sources: Mapping[str, ParamSource]) -> str:
    source = sources[message.split(" = ")[0]]
    return "the model's generation_config.json; a flag overrides it" if source == "generation_config" else "the options"
