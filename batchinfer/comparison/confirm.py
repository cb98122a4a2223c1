"""`bench compare --confirm`: each technique without and with it, on the same machine and model. Called by
cli/bench_compare.py."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batchinfer.comparison.child import flags_of, measure
from batchinfer.comparison.compare import Measure, Report, compare
from batchinfer.comparison.techniques import BLOCK_SIZE, OwnFigure, Technique, techniques
from batchinfer.comparison.variants import Variant
from batchinfer.errors import UsageError
from batchinfer.models.loader import load_spec
from batchinfer.models.resolve import ModelFiles, resolve_model
from batchinfer.options import EffectiveOptions

_TAKES = ("model", "dtype", "quantization", "activation_dtype", "device", "threads", "allow_config_fields")


def confirm(
    options: EffectiveOptions,
    quantized_model: str | None,
    rounds: int,
    folder: Path,
    report: Report,
    measure: Measure = measure,
) -> dict[str, Any]:
    """{"model": …, "rounds": N, "comparisons": [...]}; a comparison has "technique", "workload" and "settings" in
    words, "own_figure", and what compare() gives: two variants, without the technique and with it.

    options: of the model alone; their input is `folder`, which gets the jobs. quantized_model: as for --model, to
    compare its weights too. Raises UsageError for options that each technique chooses itself.
    """
    _check_given(options, folder)
    files = resolve_model(options.config.model.model, report, options.config.model.quantization)
    report(files.description)
    chosen = _techniques(options, files, quantized_model)
    comparisons = []
    for number, technique in enumerate(chosen, 1):
        report(f"technique {number} of {len(chosen)}: {technique.name}")
        comparisons.append(_compare(options, technique, rounds, folder, report, measure))
    return {"model": files.source, "rounds": rounds, "comparisons": comparisons}


def _check_given(options: EffectiveOptions, folder: Path) -> None:
    given = ["input"] if options["input"].value != (str(folder),) else []
    given += [name for name, (_, source) in options.items() if source != "default" and name not in (*_TAKES, "input")]
    if given:
        taken = ", ".join("--" + name.replace("_", "-") for name in _TAKES)
        flag = given[0].replace("_", "-")
        raise UsageError(f"--{flag}: --confirm chooses it for each technique; of run's options it takes {taken}")


def _techniques(options: EffectiveOptions, files: ModelFiles, quantized_model: str | None) -> Sequence[Technique]:
    config = options.config.model
    spec = load_spec(files.path, config.allowed_config_fields)
    runs_in = spec.dtype if config.dtype == "auto" else config.dtype
    models = (config.model or str(files.path), quantized_model) if quantized_model else None
    return techniques(spec, "fp16" if runs_in == "fp16" else "bf16", models)


def _compare(
    options: EffectiveOptions, technique: Technique, rounds: int, folder: Path, report: Report, measure: Measure
) -> dict[str, Any]:
    shared = {
        "input": (str(technique.workload.write(folder)),),
        "temperature": 0.0,
        "ignore_eos": True,
        "max_model_len": technique.workload.longest,
        "block_size": BLOCK_SIZE,
        **technique.settings,
    }
    variants = [_variant(technique.option, value) for value in (technique.without, technique.applied)]
    result = compare(options.replaced(shared, "flag"), variants, rounds, report, measure)
    return {
        "technique": technique.name,
        "workload": technique.workload.description,
        "settings": " ".join(flags_of(_without(technique.settings, technique.option))),
        "own_figure": _own_figure(technique.own_figure, result["variants"]),
        **result,
    }


def _without(settings: Mapping[str, Any], option: str) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name != option}


def _own_figure(figure: OwnFigure, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    values = [figure.value(entry) for entry in entries]
    return {"name": figure.name, "values": values, "texts": [figure.text(value) for value in values]}


def _variant(option: str, value: Any) -> Variant:
    text = ("on" if value else "off") if isinstance(value, bool) else value
    return Variant(f"{option}={text}", {option: value})
