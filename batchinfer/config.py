"""The options of a job, declared once: frozen dataclasses whose field metadata is what the command line, job files
and `LLM(...)` are made from. A broken rule raises ValueError with the field's name and what is allowed."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any

from batchinfer.cache_config import CacheConfig
from batchinfer.option_field import option, require, require_choice
from batchinfer.sampling_config import SamplingConfig
from batchinfer.scheduler_config import SchedulerConfig

DTYPES = ("auto", "bf16", "fp16", "fp32")
ACTIVATION_DTYPES = ("auto", "int8", "fp8")
QUANTIZATIONS = ("auto", "awq", "gptq", "compressed-tensors", "fp8", "gguf", "none")
ON_TOO_LONG = ("error", "truncate-left", "truncate-right")
LOAD_FORMATS = ("auto", "dummy")
DEVICES = ("auto", "cpu", "cuda")
_UNSET_SAMPLING = SamplingConfig()
_DEFAULT_CACHE = CacheConfig()
_DEFAULT_SCHEDULER = SchedulerConfig()
_MOST_THREADS = 1024  # of which OpenMP ends the process when the system has no more to give
_MAX_ERRORS = re.compile(r"\d+|\d+(\.\d+)?%")


@dataclass(frozen=True, slots=True, kw_only=True)
class InputConfig:
    """Which rows are read and where in them the prompt is."""

    input: tuple[str, ...] = option(
        (),
        "File, directory, glob or URL of .parquet or .jsonl[.gz|.zst] shards, a directory saved by `datasets`, or "
        "hf://datasets/NAME:SPLIT. Repeatable; the order given is the order of the shards.",
        kind="many",
        metavar="PATH",
        affects_answers=True,
    )
    prompt_column: str | None = option(
        None, "Column of raw prompt text. Default: `prompt` where present.", metavar="COLUMN", affects_answers=True
    )
    messages_column: str | None = option(
        None,
        "Column of chat messages (role and content), as a list or as JSON text. Default: `messages` where present.",
        metavar="COLUMN",
        affects_answers=True,
    )
    prompt_token_ids_column: str | None = option(
        None,
        "Column of token ids, taken as they are. Default: `prompt_token_ids` where present.",
        metavar="COLUMN",
        affects_answers=True,
    )
    template: str | None = option(
        None,
        "Jinja template over the row's columns that makes the prompt text; @FILE reads it from a file.",
        metavar="TEXT",
        affects_answers=True,
    )
    chat_template: str | None = option(
        None, "Jinja file that replaces the model's chat template.", metavar="FILE", affects_answers=True
    )
    param_columns: str = option(
        "auto",
        "Which columns set sampling parameters: auto (those that bear a parameter's name), none, or a list a,b.",
        metavar="auto|none|A,B",
        affects_answers=True,
    )
    on_too_long: str = option(
        "error",
        "What becomes of a prompt that leaves no room under --max-model-len.",
        choices=ON_TOO_LONG,
        affects_answers=True,
    )
    unique_id: str | None = option(
        None, "Column whose values must not repeat; a repeated one ends the job before it starts.", metavar="COLUMN"
    )
    length_class_column: str | None = option(
        None,
        "Column whose values tell rows with answers of unlike lengths apart, as a task does: how long answers become "
        "is learnt for each value (the first 63, all others together, and all rows without one), not by lengths of "
        "prompts and max_tokens.",
        metavar="COLUMN",
    )
    limit: int | None = option(None, "Answer the first N rows only.", metavar="N", affects_answers=True)
    sample: int | None = option(
        None, "Answer N rows drawn at random (by --seed), in input order.", metavar="N", affects_answers=True
    )

    def __post_init__(self) -> None:
        require_choice("on_too_long", self.on_too_long, ON_TOO_LONG)
        require(self.limit is None or self.limit > 0, "limit", self.limit, "1 or more")
        require(self.sample is None or self.sample > 0, "sample", self.sample, "1 or more")
        require(not (self.limit and self.sample), "sample", self.sample, "absent where limit is given")
        sources = [self.prompt_column, self.messages_column, self.prompt_token_ids_column, self.template]
        given = [s for s in sources if s is not None]
        require(
            len(given) <= 1,
            "prompt source",
            given,
            "one of prompt_column, messages_column, prompt_token_ids_column, template",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which weights run, where and in what precision."""

    model: str | None = option(
        None,
        "Hugging Face directory, .gguf file or hub id. Default: SmolLM2-135M-Instruct.",
        metavar="PATH|ID",
        affects_answers=True,
    )
    dtype: str = option(
        "auto",
        "Precision of weights and activations; auto is the checkpoint's own, but bf16 where it is quantised and says "
        "float16.",
        choices=DTYPES,
        affects_answers=True,
    )
    quantization: str = option(
        "auto",
        "How the checkpoint's weights are quantised; auto reads it from the checkpoint, any other value is checked "
        "against it. gguf runs the blocks of a .gguf file as they are, in place of 16-bit weights made from them.",
        choices=QUANTIZATIONS,
        affects_answers=True,
    )
    activation_dtype: str = option(
        "auto",
        "What the products of the linear layers run in; auto is the precision of --dtype. int8 makes int8 weights at "
        "load and quantises activations on the fly. fp8 quantises activations to e4m3, a scale a token; weights of up "
        "to 4 bits and fp8 stay as they are, others become e4m3, and the head keeps --dtype. It is for GPUs with e4m3 "
        "(from sm_89 on); a CPU computes the same in float32.",
        choices=ACTIVATION_DTYPES,
        affects_answers=True,
    )
    load_format: str = option(
        "auto",
        "dummy draws weights at random in the shapes of the model's config.json, which is then all that --model needs "
        "to have: for measuring speed. Without a tokenizer, a token is a byte.",
        choices=LOAD_FORMATS,
        affects_answers=True,
    )
    device: str = option("auto", "Where the model runs; auto takes the GPU if there is one.", choices=DEVICES)
    max_model_len: int | None = option(
        None,
        "Most tokens of prompt and completion. Default: the smaller of the model's and what the cache holds.",
        metavar="N",
        affects_answers=True,
    )
    allow_config_fields: str = option(
        "",
        "Fields of the model's config.json that batchinfer does not know and that you vouch for, as a,b.",
        metavar="A,B",
        affects_answers=True,
    )
    enforce_eager: bool = option(
        False, "On a GPU, launch the kernels of decode steps one by one, not as captured CUDA graphs.", kind="flag"
    )
    threads: int | None = option(None, "CPU threads. Default: the processors this process may use.", metavar="N")

    @property
    def allowed_config_fields(self) -> list[str]:
        """allow_config_fields in parts."""
        return [name for name in self.allow_config_fields.split(",") if name]

    def __post_init__(self) -> None:
        require_choice("dtype", self.dtype, DTYPES)
        require_choice("quantization", self.quantization, QUANTIZATIONS)
        require_choice("activation_dtype", self.activation_dtype, ACTIVATION_DTYPES)
        require_choice("load_format", self.load_format, LOAD_FORMATS)
        require_choice("device", self.device, DEVICES)
        require(self.max_model_len is None or self.max_model_len > 1, "max_model_len", self.max_model_len, "2 or more")
        fits = self.threads is None or 0 < self.threads <= _MOST_THREADS
        require(fits, "threads", self.threads, f"from 1 to {_MOST_THREADS}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputConfig:
    """Where and how the answers are written."""

    output: str | None = option(
        None,
        "Directory of parts, or a single .parquet or .jsonl file. Default: INPUT-STEM.completions/ beside the input.",
        metavar="PATH",
    )
    overwrite: bool = option(
        False, "Start afresh where the output exists already; what is there is deleted.", kind="flag"
    )
    rows_per_part: int = option(
        50_000, "Input rows that a part covers; a part never spans two shards.", metavar="N", affects_answers=True
    )
    output_prefix: str = option(
        "", "Prefix of the added columns, where a name is taken already.", metavar="TEXT", affects_answers=True
    )
    output_token_ids: bool = option(False, "Add the column completion_token_ids.", kind="flag", affects_answers=True)

    def __post_init__(self) -> None:
        require(self.rows_per_part > 0, "rows_per_part", self.rows_per_part, "1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """When a job stops early."""

    deadline: float | None = option(
        None,
        "From this time after the command's start on (90m, 2h) start no more rows, finish those that run, and exit 75.",
        kind="duration",
        metavar="TIME",
    )
    max_errors: str | None = option(
        None, "End the job with exit code 3 once more rows than this have failed.  [default: no limit]", metavar="N|P%"
    )

    def __post_init__(self) -> None:
        require(self.deadline is None or self.deadline > 0, "deadline", self.deadline, "above 0")
        limit = self.max_errors
        require(limit is None or _MAX_ERRORS.fullmatch(limit) is not None, "max_errors", limit, "a count or N%")

    def max_failed_rows(self, num_rows: int) -> int | None:
        """Failed rows that a job of `num_rows` rows may have; None is no limit."""
        if self.max_errors is None:
            return None
        if self.max_errors.endswith("%"):
            return int(Fraction(self.max_errors[:-1]) * num_rows / 100)
        return int(self.max_errors)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """All options of a job, by group."""

    input: InputConfig = InputConfig()
    sampling: SamplingConfig = _UNSET_SAMPLING
    model: ModelConfig = ModelConfig()
    cache: CacheConfig = _DEFAULT_CACHE
    scheduler: SchedulerConfig = _DEFAULT_SCHEDULER
    output: OutputConfig = OutputConfig()
    limits: LimitsConfig = LimitsConfig()

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> "JobConfig":
        """Distributes flat option names over the groups. Raises ValueError for a name that no group has."""
        unknown = sorted(set(options) - {f.name for _, f in iter_options()})
        if unknown:
            raise ValueError(f"unknown option {unknown[0]!r}")
        groups = {}
        for group in fields(cls):
            names = {f.name for f in fields(_group_class(group))}
            groups[group.name] = _group_class(group)(**{k: v for k, v in options.items() if k in names})
        return cls(**groups)

    def to_options(self) -> dict[str, Any]:
        """The flat form that `from_options` takes."""
        return {
            name: value
            for group in fields(self)
            for name, value in dataclasses.asdict(getattr(self, group.name)).items()
        }

    def fingerprint_options(self) -> dict[str, Any]:
        """The options that change answers or layout; a resumed job must keep them. Of kv_guard that is only whether it
        is strict."""
        options = self.to_options()
        kept = {f.name: options[f.name] for _, f in iter_options() if f.metadata["affects_answers"]}
        return kept | {"kv_guard": "strict" if self.cache.guard.is_strict else "warn"}


def _group_class(group: "dataclasses.Field[Any]") -> type[Any]:
    return type(group.default)


def iter_options() -> Iterator[tuple[str, "dataclasses.Field[Any]"]]:
    """(group name, field) of each option, in the order of the help text."""
    for group in fields(JobConfig):
        for member in fields(_group_class(group)):
            yield group.name, member
