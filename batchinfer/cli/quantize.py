"""`batchinfer quantize`: makes a quantised checkpoint."""

import click

from batchinfer.cli.results import say
from batchinfer.conversion.options import FORMATS, METHODS, stated_options

_METHOD_HELP = (
    "awq: scales found by trying; gptq: errors made up for column by column; awq-gptq: the one, then the other; rtn: "
    "rounding to nearest, without calibration; fp8: 8-bit floats, a scale a channel."
)


@click.command(short_help="Make a quantised checkpoint of a 16-bit one.")
@click.option("--model", metavar="PATH|ID", help="As in `run`.  [default: the default model]")
@click.option("--output", metavar="DIR", required=True, help="Directory of the new checkpoint.")
@click.option("--method", type=click.Choice(METHODS), default="awq", show_default=True, help="How weights are rounded.")
@click.option("--format", "file_format", type=click.Choice(FORMATS), help="[default: the method's own]")
@click.option("--bits", type=int, metavar="N", help="Of a weight: 2, 3, 4 or 8.  [default: 4; 8 with fp8]")
@click.option(
    "--group-size", type=int, metavar="N", help="Inputs a scale; -1: all of a row.  [default: 128; none with fp8]"
)
@click.option(
    "--symmetric/--no-symmetric",
    default=None,
    help="Without zero points, or with.  [default: symmetric in gptq files, which vLLM reads no others of]",
)
@click.option("--act-order", is_flag=True, help="GPTQ files: groups of inputs in falling order of their size.")
@click.option("--damp", type=float, metavar="X", help="GPTQ: share of the mean added to moments.  [default: 0.01]")
@click.option(
    "--calibration",
    metavar="FILE",
    help="Texts: a column of .parquet or .jsonl[.gz|.zst], or a .txt or .md file whole.  [default: a built-in text of "
    "3,000 tokens]",
)
@click.option(
    "--calibration-column", metavar="COLUMN", help="[default: text, prompt or messages, the first that is there]"
)
@click.option(
    "--calibration-samples",
    type=click.IntRange(min=1),
    metavar="N",
    help="Windows of text, at most.  [default: 128]",
)
@click.option(
    "--calibration-length",
    type=click.IntRange(min=16),
    metavar="TOKENS",
    help="Of a window, at most.  [default: 512]",
)
@click.option(
    "--search-tokens",
    type=click.IntRange(min=1),
    metavar="TOKENS",
    help="AWQ: calibration tokens that scales are tried on, at least.  [default: 4096]",
)
@click.option(
    "--kv-cache-scales", is_flag=True, help="Store calibrated scales of an fp8 KV cache (compressed-tensors)."
)
@click.option(
    "--seed", type=click.IntRange(min=0), metavar="N", help="Which windows are drawn of more text.  [default: 0]"
)
def quantize(model: str | None, output: str, file_format: str | None, **options: object) -> None:
    """Make a quantised checkpoint layer by layer. Stopped at any moment, the same command carries on."""
    checked = stated_options(format=file_format, **options)
    from batchinfer.conversion.quantize_job import quantize_model  # here, as it brings torch

    quantize_model(model, output, checked, say)
