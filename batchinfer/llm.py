"""The engine from Python: `LLM(...).generate(prompts, params)`, with run's options by the same names."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from batchinfer.config import InputConfig, JobConfig, LimitsConfig, OutputConfig, iter_options
from batchinfer.data.prompt_source import PromptSource, SourceKind
from batchinfer.data.prompts import PromptBuilder
from batchinfer.data.sampling_defaults import resolve_sampling
from batchinfer.errors import UsageError
from batchinfer.executors.local import load_engine
from batchinfer.models.loader import generation_config
from batchinfer.models.resolve import resolve_model
from batchinfer.options import coerce, did_you_mean
from batchinfer.request import Request, Result, SamplingParams
from batchinfer.scheduling.window import Window

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
# Options that are about files and rows.
_OF_FILES = frozenset(
    {f.name for cls in (InputConfig, OutputConfig, LimitsConfig) for f in fields(cls)} | {"kv_guard", "lengths_from"}
) - {
    "chat_template",
    "on_too_long",
}


class LLM:
    """A model loaded in this process.

    model: Hugging Face directory, .gguf file or hub id; None is the default model. options: those of `batchinfer run`
    about model, cache, scheduling and sampling, as in kv_cache_memory="24MiB". Raises UsageError for an unknown or
    unfit option, BatchInferError for a faulty model.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        config = _config({**options, "model": model})
        files = resolve_model(config.model.model, _say, config.model.quantization, config.model.load_format)
        self.model_path: Path = files.path
        self._config = config
        self._local = load_engine(config, files, _say)
        self._defaults, _ = resolve_sampling(config.sampling, generation_config(files.path))

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Result]:
        """Completes each prompt, text or token ids. One result a prompt (n of them where params.n is n), in order; a
        prompt that cannot be answered has finish_reason "error".

        params: for all prompts or one each; None takes the options given to LLM(...).
        """
        if not isinstance(prompts, str | Sequence | np.ndarray):
            raise UsageError(f"prompts: {type(prompts).__name__} is neither text nor token ids, nor a list of them")
        values = [prompts] if isinstance(prompts, str) or _is_token_ids(prompts) else list(prompts)
        are_text = [isinstance(value, str) for value in values if value is not None]
        if any(are_text) and not all(are_text):
            raise UsageError("prompts: must be all text or all token ids")
        return self._run("prompt" if all(are_text) else "prompt_token_ids", values, params)

    def chat(
        self,
        conversations: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Result]:
        """Answers each conversation, a list of {"role", "content"}, through the model's chat template."""
        is_one = bool(conversations) and isinstance(conversations[0], Mapping)
        return self._run("messages", [conversations] if is_one else list(conversations), params)

    def _run(
        self, kind: SourceKind, values: list[Any], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Result]:
        each = _of_each(self._defaults if params is None else params, len(values))
        entries = self._builder(kind).build_values(0, 0, values, each)
        engine = self._local.engine
        results = {entry.id: entry for entry in entries if isinstance(entry, Result)}
        try:
            window = Window(self._config.scheduler, engine.block_size, engine.expected_output_tokens)
            window.add([entry for entry in entries if isinstance(entry, Request)])
            while len(window):
                for request in window.take()[0]:
                    engine.add(request)
            while engine.has_unfinished:
                results |= {result.id: result for result in engine.step()}
        except BaseException:
            engine.abandon()  # the next call starts from an idle engine
            raise
        return [results[entry.id] for entry in entries]

    def _builder(self, kind: SourceKind) -> PromptBuilder:
        engine = self._local.engine
        return PromptBuilder(
            source=PromptSource(kind, (kind,)),
            tokenizer=self._local.tokenizer,
            defaults=self._defaults,
            vocab_size=engine.vocab_size,
            max_model_len=engine.max_model_len,
            seed=self._config.sampling.seed,
            on_too_long=self._config.input.on_too_long,
        )


def _config(options: Mapping[str, Any]) -> JobConfig:
    members = {member.name: member for _, member in iter_options() if member.name not in _OF_FILES}
    values = {}
    for name, value in options.items():
        if name not in members:
            advice = did_you_mean(name, members) or "those of `batchinfer run` about model, cache and sampling fit"
            raise UsageError(f"LLM has no option {name!r}; {advice}")
        try:
            values[name] = value if value is None else coerce(members[name], value)
        except (ValueError, TypeError) as error:
            raise UsageError(f"{name}: {error}") from error
    try:
        return JobConfig.from_options(values)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _of_each(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    each = [params] * count if isinstance(params, SamplingParams) else params
    if not isinstance(each, list | tuple) or not all(isinstance(one, SamplingParams) for one in each):
        raise UsageError("params: must be SamplingParams, or a list of them")
    if len(each) != count:
        raise UsageError(f"params: {len(each)} for {count} prompts; give one for all, or one each")
    return list(each)


def _is_token_ids(prompt: Any) -> bool:
    return not isinstance(prompt, str) and bool(len(prompt)) and not isinstance(prompt[0], str | Sequence | np.ndarray)


def _say(line: str) -> None:
    print(f"batchinfer: {line}", file=sys.stderr)
