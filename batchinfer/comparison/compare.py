"""Runs the variants of a job in turn and puts their figures together. Called by cli/bench_compare.py and confirm.py."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from batchinfer.comparison.child import measure
from batchinfer.comparison.variants import Variant, plan_runs, with_variant
from batchinfer.errors import BatchInferError, UsageError
from batchinfer.options import EffectiveOptions

Report = Callable[[str], None]
Measure = Callable[[EffectiveOptions, Report], dict[str, Any]]
_OF_THE_WORK = ("rows", "prompt_tokens", "completion_tokens")
_SAME_IN_ALL = ("options", "versions")  # of bench throughput's figures, as are:
_OF_ONE_RUN = ("timeline",)  # has no median


def compare(
    options: EffectiveOptions, variants: Sequence[Variant], rounds: int, report: Report, measure: Measure = measure
) -> dict[str, Any]:
    """{"variants": [...], "rounds": N, "same_work": bool, "versions": {...}}, the variants in their order.

    A variant has "name", "options" (those that vary), the figures of bench throughput, each the median over the rounds,
    and "runs", the figures of each round. Raises BatchInferError naming the variant that failed.
    """
    varied = [with_variant(options, variant) for variant in variants]
    plan = plan_runs(len(variants), rounds)
    runs: list[list[dict[str, Any]]] = [[] for _ in variants]
    for number, (_, index) in enumerate(plan, 1):
        name = variants[index].name
        report(f"run {number} of {len(plan)}: {name}")
        runs[index].append(_measured(name, varied[index], report, measure))
    entries = [_entry(variant, of_variant) for variant, of_variant in zip(variants, runs, strict=True)]
    same_work = _check_work(entries, report)
    return {"variants": entries, "rounds": rounds, "same_work": same_work, "versions": runs[0][0]["versions"]}


def medians(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Each figure's median over the runs, at any depth; what is no number, or not in each run, is the first run's."""
    return {name: _median([run.get(name) for run in runs]) for name in runs[0]}


def _measured(name: str, options: EffectiveOptions, report: Report, measure: Measure) -> dict[str, Any]:
    try:
        return measure(options, report)
    except UsageError as error:
        raise UsageError(f"variant {name}: {error}") from error
    except BatchInferError as error:
        raise BatchInferError(f"variant {name}: {error}") from error


def _entry(variant: Variant, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    own = [{name: value for name, value in run.items() if name not in _SAME_IN_ALL} for run in runs]
    steady = [{name: value for name, value in run.items() if name not in _OF_ONE_RUN} for run in own]
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in variant.values.items()}
    return {"name": variant.name, "options": values, **medians(steady), "runs": own}


def _median(values: Sequence[Any]) -> Any:
    first = values[0]
    if all(value == first for value in values):
        return first  # counts stay whole numbers
    if all(isinstance(value, Mapping) for value in values):
        return medians(values)
    if all(isinstance(value, int | float) for value in values):
        return statistics.median(values)
    return first


def _check_work(entries: Sequence[Mapping[str, Any]], report: Report) -> bool:
    """Whether all runs did the same work; the report says what differs, and which rows failed."""
    runs = [(entry["name"], run) for entry in entries for run in entry["runs"]]
    for name, run in runs:
        if run["finish_reasons"]["error"]:
            report(f"warning: {run['finish_reasons']['error']:,} rows failed in {name}")
    different = [name for name in _OF_THE_WORK if len({run[name] for _, run in runs}) > 1]
    for figure in different:
        counts = "; ".join(f"{run[figure]:,} in {name}" for name, run in runs)
        report(
            f"warning: the work is not the same, {figure.replace('_', ' ')}: {counts} (--ignore-eos with --max-tokens "
            "makes completions equally long)"
        )
    return not different
