"""A job: reader → engine → writer. Called by the command line for `run` and `bench throughput`; owns progress, exit
codes and the rules that end a job early."""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from batchinfer.agreement import TokenKeeper, mean_agreement, reference_options
from batchinfer.config import JobConfig
from batchinfer.data.claim import check_output
from batchinfer.data.earlier_lengths import EarlierLengths
from batchinfer.data.feeder import Feeder
from batchinfer.data.files import with_file_contents
from batchinfer.data.job_input import JobInput, default_output
from batchinfer.data.result_schema import Tally, result_schema
from batchinfer.data.sampling_defaults import resolve_sampling
from batchinfer.data.tokenizer import Tokenizer
from batchinfer.data.writer import FinishedOutput, OutputJob, OutputWriter, open_output
from batchinfer.energy import EnergyMeter
from batchinfer.errors import ExitCode, UsageError
from batchinfer.executors.early_pages import early_pages
from batchinfer.executors.kv_guard import first_prompts, guard_kv_cache, wide_layers_of
from batchinfer.executors.local import LoadedModel, build_engine, cache_spec, load_model, prepare_kernels
from batchinfer.executors.loop import Discard, Ending, EndingRules, Sink, run_loop
from batchinfer.models.loader import checkpoint_options, generation_config
from batchinfer.models.resolve import resolve_model
from batchinfer.options import EffectiveOptions, OptionValue
from batchinfer.process import StopSignals, peak_memory_bytes, versions
from batchinfer.progress import Progress, ProgressFigures
from batchinfer.request import Result
from batchinfer.summary import RequestStatistics, RunFigures, summarise, summary_table, with_earlier_runs
from batchinfer.timing import Phases

Wanted = Callable[[int, int, int], npt.NDArray[np.bool_]]
_ENDINGS = {
    Ending.INTERRUPTED: (ExitCode.INTERRUPTED, "interrupted; the same command{} carries on"),
    Ending.DEADLINE: (ExitCode.INTERRUPTED, "the deadline passed; the same command{} carries on"),
    Ending.TOO_MANY_ERRORS: (
        ExitCode.TOO_MANY_ERRORS,
        "more rows failed than --max-errors allows; with another limit the same command{} carries on",
    ),
}


def run_job(options: EffectiveOptions) -> ExitCode:
    """Answers every row of the input into the output files. Raises BatchInferError for faults that end a job, and
    KeyboardInterrupt where SIGINT or SIGTERM come at a time when no row runs, or twice."""
    target = options.config.output.output or default_output(options.config.input.input[0])
    with StopSignals() as signals:
        run = _Run(options, signals, target)
        run.check_output(target)
        run.find_model()
        overwrites = options.config.output.overwrite
        opened = open_output(target, run.output_job(), overwrites)
        if isinstance(opened, FinishedOutput):
            _say(f"{opened.target} is finished already; --overwrite answers the rows again")
            return ExitCode.DONE
        with opened as writer:
            return _answer_to_files(run, writer, target, overwrites)


def bench_throughput(
    options: EffectiveOptions, agreement: bool = False, agreement_with: str | None = None
) -> dict[str, Any]:
    """Runs the whole job in memory, its answers not written, and returns its figures: summarise()'s and startup_s, the
    seconds from the start to the first tokenisation, and energy_joules where the processor's counters are readable.

    agreement: answers the rows again by the same model in float32, or by agreement_with, a model as for --model, and
    adds how far the answers agree.
    """
    options = options.refined({"kv_guard": OptionValue("0", "bench")})
    with StopSignals() as signals:
        if not (agreement or agreement_with):
            return _measure(_Run(options, signals), Discard())
        measured, reference = TokenKeeper(), TokenKeeper()
        figures = _measure(_Run(options, signals), measured)
        model = agreement_with or options.config.model.model
        begin = time.monotonic()
        _measure(_Run(reference_options(options, model, figures["max_model_len"]), signals), reference)
    return {
        **figures,
        "agreement_tokens_mean": mean_agreement(measured.tokens, reference.tokens),
        "agreement_seconds": time.monotonic() - begin,
    }


def _measure(run: "_Run", sink: Sink) -> dict[str, Any]:
    run.find_model()
    run.load(run.input.rows.num_rows)
    with EnergyMeter() as meter:
        ending = run.answer(sink, run.input.selected, Tally())
    if ending is Ending.INTERRUPTED:
        raise KeyboardInterrupt
    return {"startup_s": run.startup_s, "max_model_len": run.max_model_len, **meter.figures(), **run.figures(Tally())}


def _answer_to_files(run: "_Run", writer: OutputWriter, target: str, overwrites: bool) -> ExitCode:
    before = deepcopy(writer.tally)
    if writer.is_resumed:
        _say(f"carrying on: {writer.num_resumed:,} of {writer.num_rows:,} rows are answered already")
    run.load(writer.num_rows - writer.num_resumed, writer.kept)
    guard = {"kv_guard": run.guard_outcome} if run.guard_outcome else {}
    writer.keep(max_model_len=run.max_model_len, **guard)
    ending = run.answer(writer, writer.wanted, before, writer.poll)
    if writer.num_done < writer.num_rows:
        writer.flush()
        code, message = _ENDINGS[ending]
        message = message.format(" without --overwrite" if overwrites else "")
        _say(f"{message} ({writer.num_done:,} of {writer.num_rows:,} rows are answered in {target})")
        return code
    with run.phases.timed("output"):
        writer.drain()
    stats = run.figures(before)
    writer.finish(stats)
    print(summary_table(stats, target), file=sys.stderr)
    return _ENDINGS[ending][0] if ending is Ending.TOO_MANY_ERRORS else ExitCode.DONE


class _Run:
    """One run of a job in this process: its input, its model, its figures."""

    def __init__(self, options: EffectiveOptions, signals: StopSignals, output: str | None = None) -> None:
        self._signals = signals
        self.phases = Phases()
        self._start = time.monotonic()
        self._options = options
        self._config: JobConfig = options.config
        _say(f"options: {options.describe()}")
        with self.phases.timed("input"):
            self.input = JobInput.read(self._config.input, self._config.sampling.seed, _say, output)
            earlier, rows = self._config.scheduler.lengths_from, self.input.rows
            self._earlier_lengths = None if earlier is None else EarlierLengths(earlier, rows)
        self._fingerprint_options = with_file_contents(self._config.fingerprint_options())
        self._statistics = RequestStatistics()

    def check_output(self, target: str) -> None:
        """Raises UsageError where the output cannot hold the columns of input and results; no model is needed."""
        check_output(target, self.input.shard_set.shards, result_schema(**self._result_columns()))

    def find_model(self) -> None:
        """Finds or fetches the model's files, and reads what rows that carry no parameters get."""
        model = self._config.model
        with self.phases.timed("model"):
            self._files = resolve_model(model.model, _say, model.quantization, model.load_format)
        _say(self._files.description)
        self._sampling, sources = resolve_sampling(self._config.sampling, generation_config(self._files.path))
        effective = {name: OptionValue(getattr(self._sampling, name), source) for name, source in sources.items()}
        self._options = self._options.refined(effective | checkpoint_options(self._files.path, model))
        _say(f"sampling of rows that do not choose: {self._options.describe_sampling()}")

    def output_job(self) -> OutputJob:
        """What binds the output files to this job, and what they contain."""
        return OutputJob(
            shards=self.input.shard_set.shards,
            selection=self.input.selection,
            rows_per_part=self._config.output.rows_per_part,
            model_fingerprint=self._files.fingerprint,
            options=self._fingerprint_options,
            metadata={"batchinfer.options": json.dumps(self._options.to_json())},
            **self._result_columns(),
        )

    def _result_columns(self) -> dict[str, Any]:
        """What decides which columns are added."""
        sampling, output = self._config.sampling, self._config.output
        return {
            "prefix": output.output_prefix,
            "token_ids": output.output_token_ids,
            "logprobs": sampling.logprobs is not None,
            "prompt_logprobs": bool(sampling.prompt_logprobs),
        }

    def load(self, num_left: int, kept: Mapping[str, Any] | None = None) -> None:
        """Loads the model and sizes its cache. num_left: rows to answer. kept: what the job's first run chose."""
        config, kept = self._config, kept or {}
        kept_len = kept.get("max_model_len")
        if kept_len is not None:
            if config.model.max_model_len is None:
                _say(f"--max-model-len: {kept_len:,}, as the job's first run chose; later ones keep it")
            config = replace(config, model=replace(config.model, max_model_len=kept_len))
        with self.phases.timed("kernels"):
            prepare_kernels(config, _say)
        with self.phases.timed("model"):
            pages = partial(early_pages, config, self._files, self.input, self._sampling, num_left)
            model = load_model(config, self._files, _say, pages)
        self.guard_outcome = kept.get("kv_guard") if kept else self._guard(config, model)
        try:
            with self.phases.timed("model"):
                self._local = build_engine(config, model, _say, wide_layers_of(self.guard_outcome))
        except UsageError as error:
            if kept_len is None:
                raise
            advice = "(another one needs another --output, or --overwrite)"
            raise UsageError(
                f"the job began with --max-model-len {kept_len} and keeps it, but {error} {advice}"
            ) from error
        apart = sum(self.phases.seconds.get(name, 0) for name in ("kernels", "KV guard"))
        self.startup_s = time.monotonic() - self._start - apart

    def _guard(self, config: JobConfig, model: LoadedModel) -> dict[str, Any] | None:
        """The outcome of --kv-guard on the job's first rows."""
        rules = config.cache.guard
        if not rules.num_rows:
            return None
        with self.phases.timed("KV guard"):
            longest = config.model.max_model_len or model.decoder.spec.max_position_embeddings
            with self._feeder(model.tokenizer, model.decoder.vocab_size, longest, self.input.selected) as feeder:
                prompts = first_prompts(feeder, rules.num_rows)
            outcome = guard_kv_cache(model.decoder, cache_spec(config.cache, model), prompts, rules.is_strict, _say)
        return outcome.to_json() if outcome else None

    @property
    def max_model_len(self) -> int:
        return self._local.engine.max_model_len

    def answer(self, sink: Sink, wanted: Wanted, before: Tally, poll: Callable[[], None] = lambda: None) -> Ending:
        """Runs the wanted rows through the model, the results into the sink.

        before: what earlier runs answered. poll: called each step.
        """
        with self._signals.deferred(), self.phases.timed("inference"):
            return self._drive(_Observed(sink, self._statistics), wanted, before, poll)

    def _drive(self, sink: Sink, wanted: Wanted, before: Tally, poll: Callable[[], None]) -> Ending:
        engine, num_rows = self._local.engine, self.input.rows.num_rows
        rules = EndingRules(self._config.limits, num_rows, self._start, self._signals)
        progress = Progress(num_rows)

        def should_end() -> Ending | None:
            poll()
            figures = self._progress(before)
            progress.update(figures)
            return rules.ending(figures.errors)

        with self._feeder(self._local.tokenizer, engine.vocab_size, engine.max_model_len, wanted) as feeder:
            ending = run_loop(engine, feeder, sink, self._config.scheduler, should_end)
        figures = self._progress(before)
        progress.close(figures)
        return Ending.TOO_MANY_ERRORS if rules.has_too_many(figures.errors) else ending

    def figures(self, before: Tally) -> dict[str, Any]:
        """The content of _stats.json. Counts are of the whole job, times and throughput of this run."""
        run = RunFigures(
            rows_resumed=before.rows,
            phase_seconds=self.phases.seconds,
            busy_seconds=self.phases.seconds["inference"],
            peak_memory_bytes=peak_memory_bytes(),
            kv_cache_bytes=self._local.kv_cache_bytes,
            device=self._local.device,
            versions=versions(),
            options=self._options.to_json(),
        )
        figures = with_earlier_runs(summarise(self._statistics, self._local.figures(), run), before)
        return figures | ({"kv_guard": self.guard_outcome} if self.guard_outcome else {})

    def _feeder(self, tokenizer: Tokenizer, vocab_size: int, max_model_len: int, wanted: Wanted) -> Feeder:
        of_model = (tokenizer, self._sampling, vocab_size, max_model_len)
        builder = self.input.builder(self._config, *of_model, self._earlier_lengths)
        return Feeder(self.input.shard_set.shards, self.input.selection, builder, wanted)

    def _progress(self, before: Tally) -> ProgressFigures:
        done, engine = self._statistics, self._local.engine.stats
        tokens_done = done.prompt_tokens + done.completion_tokens
        return ProgressFigures(
            rows_done=before.rows + done.rows,
            rows_done_here=done.rows,
            errors=before.num_errors + done.errors,
            tokens_of_rows_done=tokens_done,
            tokens_computed=max(tokens_done, engine.scheduled_tokens),
            output_tokens=engine.sampled_tokens,
        )


class _Observed:
    """A sink that counts what it passes on."""

    def __init__(self, sink: Sink, statistics: RequestStatistics) -> None:
        self._statistics = statistics
        self._sink = sink
        self.expect = sink.expect

    def add(self, results: Sequence[Result]) -> None:
        for result in results:
            self._statistics.add(result)
        self._sink.add(results)


def _say(line: str) -> None:
    print(f"batchinfer: {line}", file=sys.stderr, flush=True)
