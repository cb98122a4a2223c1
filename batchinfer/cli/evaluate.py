"""`batchinfer evaluate`: what a model or a precision is worth on a text."""

from typing import Any

import click

from batchinfer.cli.options import TitledCommand, options_of_run
from batchinfer.cli.results import ResultFile, json_option, say, show

_PRECISION = ("dtype", "quantization", "activation_dtype", "kv_cache_dtype", "kv_cache_dtype_skip_layers")
_MODEL = ("model", *_PRECISION, "device", "threads", "max_num_batched_tokens", "allow_config_fields")
_OPTIONS = options_of_run(_MODEL, "Model: what is evaluated, as for run.")
_OPTIONS += options_of_run(_PRECISION, "Against: the precision of what it is held against.", "against_")


@click.command(cls=TitledCommand, more_options=_OPTIONS, short_help="Perplexity, and how far two models lie apart.")
@click.option(
    "--text",
    multiple=True,
    required=True,
    metavar="FILE",
    help="Texts: a column of .parquet or .jsonl[.gz|.zst], or a .txt or .md file whole. Repeatable.",
)
@click.option("--text-column", metavar="COLUMN", help="Column of the texts.  [default: text, else prompt]")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Score the first N texts only.")
@click.option("--window", default=512, metavar="N", help="Targets of a window at most.  [default: 512]")
@click.option("--min-inputs", default=16, metavar="N", help="Drop windows with fewer inputs.  [default: 16]")
@click.option("--against", metavar="PATH|ID", help="Hold the model against this one; it may be the same model.")
@click.option(
    "--greedy-prompts",
    type=click.IntRange(min=0),
    default=32,
    metavar="N",
    help="With --against, answer the beginnings of N windows greedily by both; 0 leaves that out.  [default: 32]",
)
@click.option(
    "--greedy-tokens", type=click.IntRange(min=1), default=128, metavar="N", help="…with N tokens.  [default: 128]"
)
@json_option
def evaluate(json_file: ResultFile | None, **values: Any) -> None:
    """Score texts by a model, and with --against show how far it lies from another model or precision.

    Each text alone, without BOS, in consecutive windows that start afresh. The divergence is KL(AGAINST || MODEL).
    """
    from batchinfer.evaluation.evaluate import evaluate as evaluated  # here, as it brings torch
    from batchinfer.evaluation.evaluate import make_evaluation
    from batchinfer.evaluation.table import evaluation_table

    figures = evaluated(make_evaluation(values), say)
    show(evaluation_table(figures), json_file)
    if json_file is not None:
        json_file.write_json(figures)
