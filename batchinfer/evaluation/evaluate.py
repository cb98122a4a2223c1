"""`batchinfer evaluate`: a model, or a precision of it, scored on a text and held against another. Called by the
command line."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from batchinfer.agreement import mean_agreement
from batchinfer.config import JobConfig, iter_options
from batchinfer.data.texts import iter_texts
from batchinfer.data.tokenizer import Tokenizer
from batchinfer.errors import UsageError
from batchinfer.evaluation.greedy import check_positions, greedy_answers
from batchinfer.evaluation.scoring import Scores, Side, score_windows
from batchinfer.evaluation.windows import TokenIds, WindowRules, cut
from batchinfer.executors.local import LoadedModel, cache_spec, load_model, prepare_kernels
from batchinfer.models.resolve import ModelFiles, resolve_model
from batchinfer.process import peak_memory_bytes, versions
from batchinfer.progress import WorkProgress

_SHARED = ("device", "threads", "max_num_batched_tokens", "allow_config_fields")  # options that hold for both sides
_SAME = "only models of one vocabulary can be compared token by token"
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What is asked for. text: files as of data.texts. model, against: their options of model, cache and scheduling."""

    text: tuple[str, ...]
    column: str | None
    limit: int | None  # texts at most
    rules: WindowRules
    model: JobConfig
    against: JobConfig | None
    greedy_prompts: int
    greedy_tokens: int


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A side, loaded. option: that names it, for messages."""

    option: str
    config: JobConfig
    files: ModelFiles
    model: LoadedModel

    @property
    def side(self) -> Side:
        return Side(f"{self.option} {self.files.path}", self.model.decoder, cache_spec(self.config.cache, self.model))

    def describe(self) -> dict[str, str]:
        """What it is, for the figures."""
        spec = self.side.cache_spec
        wide = f" (layers {', '.join(map(str, spec.wide_layers))} {spec.wide_dtype})" if spec.wide_layers else ""
        return {
            "model": str(self.config.model.model or self.files.path),
            "dtype": spec.wide_dtype,
            "activation_dtype": self.config.model.activation_dtype,
            "kv_cache_dtype": spec.dtype + wide,
        }


def make_evaluation(values: Mapping[str, Any]) -> Evaluation:
    """values: the fields of Evaluation and WindowRules; options of run that concern the model; the same with "against_"
    before their names, and `against`, the model. Raises UsageError naming the option and what is allowed."""
    names = {member.name for _, member in iter_options()} - {"limit"}
    model = {name: value for name, value in values.items() if name in names and value is not None}
    prefixed = {name.removeprefix("against_"): value for name, value in values.items() if name.startswith("against_")}
    against = {name: value for name, value in prefixed.items() if value is not None}
    if against and values["against"] is None:
        option = f"--against-{min(against)}".replace("_", "-")
        raise UsageError(f"{option}: there is nothing to hold against; name a model with --against")
    try:
        shared = {name: model[name] for name in _SHARED if name in model}
        against = shared | against | {"model": values["against"]}
        return Evaluation(
            text=tuple(values["text"]),
            column=values["text_column"],
            limit=values["limit"],
            rules=WindowRules(values["window"], values["min_inputs"]),
            model=JobConfig.from_options(model),
            against=None if values["against"] is None else JobConfig.from_options(against),
            greedy_prompts=values["greedy_prompts"],
            greedy_tokens=values["greedy_tokens"],
        )
    except ValueError as error:
        raise UsageError(str(error)) from error


def evaluate(evaluation: Evaluation, report: Report) -> dict[str, Any]:
    """Returns the figures, JSON types only; see `table.py` for those that a person reads. `report` gets lines that say
    what is done.

    perplexity: exp of the mean, over all targets, of the negative log-probability in float32. Held against another:
    kl_divergence, the mean over the targets of KL(against || model) in nats, with _p99 and _max; top1_agreement, the
    share of targets before which both hold the same token for the likeliest; greedy_agreement_tokens, the mean number
    of greedy tokens before the first difference. Raises UsageError and BatchInferError.
    """
    begin = time.monotonic()
    prepare_kernels(evaluation.model, report)
    model = _load("--model", evaluation.model, None, report)
    against = _load("--against", evaluation.against, model, report) if evaluation.against else None
    texts = _tokenised(evaluation, [model, against] if against else [model])
    windows = _windows(evaluation, texts, [model, against] if against else [model])
    if against is not None and evaluation.greedy_prompts:
        for side in (model, against):
            check_positions(side.model, evaluation.greedy_tokens)
    scores, seconds = _score(evaluation, windows, model, against, report)
    figures = {
        "texts": len(texts),
        "windows": len(windows),
        "tokens": len(scores.logprobs),
        "window": evaluation.rules.window,
        **model.describe(),
        "perplexity": _perplexity(scores.logprobs),
    }
    if against is not None:
        figures |= {"against": against.describe(), **_comparison(scores)}
        if evaluation.greedy_prompts:
            figures |= _greedy(evaluation, windows, model, against, report)
    return figures | {
        "scoring_seconds": seconds,
        "tokens_per_s": len(scores.logprobs) / seconds,
        "wall_seconds": time.monotonic() - begin,
        "peak_memory_bytes": peak_memory_bytes(),
        "device": model.model.device,
        "versions": versions(),
    }


def _load(option: str, config: JobConfig, other: _Loaded | None, report: Report) -> _Loaded:
    """other: whose weights are taken where they are the same."""
    files = resolve_model(config.model.model, report, config.model.quantization)
    report(files.description if option == "--model" else f"against {files.description}")
    if other is not None and (files.fingerprint, *_precision(config)) == (
        other.files.fingerprint,
        *_precision(other.config),
    ):
        return _Loaded(option, config, files, other.model)
    return _Loaded(option, config, files, load_model(config, files, report))


def _precision(config: JobConfig) -> tuple[str, str, str]:
    return config.model.dtype, config.model.activation_dtype, config.model.quantization


def _tokenised(evaluation: Evaluation, sides: Sequence[_Loaded]) -> list[TokenIds]:
    """The token ids of each text, without BOS. Raises UsageError where the sides' differ."""
    every = (text for path in evaluation.text for text in iter_texts("--text", path, evaluation.column))
    texts = list(islice(every, evaluation.limit))
    if not texts:
        raise UsageError(f"--text {' '.join(evaluation.text)}: there is no text")
    first, *others = (_encode(side.model.tokenizer, texts) for side in sides)
    for other in others:
        if sides[1].model.decoder.vocab_size != sides[0].model.decoder.vocab_size:
            sizes = [side.model.decoder.vocab_size for side in sides]
            raise UsageError(f"--against: its vocabulary has {sizes[1]} tokens, that of --model {sizes[0]}; {_SAME}")
        if not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True)):
            raise UsageError(f"--against: its tokenizer cuts the texts otherwise than that of --model; {_SAME}")
    return first


def _encode(tokenizer: Tokenizer, texts: list[str]) -> list[TokenIds]:
    return tokenizer.encode_batch(texts, add_special_tokens=False)


def _windows(evaluation: Evaluation, texts: Sequence[TokenIds], sides: Sequence[_Loaded]) -> list[TokenIds]:
    longest = min(side.model.decoder.spec.max_position_embeddings for side in sides)
    if evaluation.rules.window > longest:
        raise UsageError(f"--window {evaluation.rules.window}: the model has positions for {longest} tokens")
    windows = list(cut(texts, evaluation.rules))
    if not windows:
        most = max(len(ids) for ids in texts)
        raise UsageError(
            f"--text {' '.join(evaluation.text)}: the longest text has {most} tokens, fewer than the "
            f"{evaluation.rules.min_inputs + 1} of --min-inputs and a target"
        )
    return windows


def _score(
    evaluation: Evaluation, windows: Sequence[TokenIds], model: _Loaded, against: _Loaded | None, report: Report
) -> tuple[Scores, float]:
    """The scores and the seconds that they took."""
    num_tokens = sum(len(window) - 1 for window in windows)
    report(f"scoring {num_tokens:,} tokens in {len(windows):,} windows of up to {evaluation.rules.window}")
    progress = WorkProgress(num_tokens, "tokens")
    begin = time.monotonic()
    tokens_a_pass = evaluation.model.scheduler.max_num_batched_tokens
    scores = score_windows(model.side, against.side if against else None, windows, tokens_a_pass, progress.add)
    progress.close()
    return scores, time.monotonic() - begin


def _perplexity(logprobs: Any) -> float:
    with np.errstate(over="ignore"):
        return float(np.exp(-logprobs.mean(dtype=np.float64)))


def _comparison(scores: Scores) -> dict[str, float]:
    assert scores.against_logprobs is not None
    assert scores.divergence is not None
    kl = scores.divergence.kl
    return {
        "against_perplexity": _perplexity(scores.against_logprobs),
        "kl_divergence": scores.divergence.mean_kl,
        "kl_divergence_p99": float(np.percentile(kl, 99)),
        "kl_divergence_max": float(kl.max()),
        "top1_agreement": scores.divergence.top1_agreement,
    }


def _greedy(
    evaluation: Evaluation, windows: Sequence[TokenIds], model: _Loaded, against: _Loaded, report: Report
) -> dict[str, float]:
    """The agreement of greedy continuations of windows' beginnings, the windows taken at even distances."""
    begin = time.monotonic()
    count = min(evaluation.greedy_prompts, len(windows))
    chosen = [windows[i * len(windows) // count] for i in range(count)]
    report(f"answering {count} beginnings of windows with {evaluation.greedy_tokens} greedy tokens by both")
    answers = [greedy_answers(side.config, side.model, chosen, evaluation.greedy_tokens) for side in (model, against)]
    return {
        "greedy_agreement_tokens": mean_agreement(answers[0], answers[1]),
        "greedy_prompts": count,
        "greedy_tokens": evaluation.greedy_tokens,
        "greedy_seconds": time.monotonic() - begin,
    }
