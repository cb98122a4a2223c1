"""How many tokens a row of a job will at least have in the mean, guessed from the first ones before there is a
tokenizer. Called by the pipeline, to ask for the cache's memory early."""

from typing import Any

from batchinfer.data.job_input import JobInput
from batchinfer.data.readers import iter_rows
from batchinfer.request import SamplingParams

_SAMPLE_ROWS = 64
_TOKEN_CHARACTERS = 4  # of most texts, or fewer
_SURE_OUTPUT = 64  # tokens of an answer that may end by itself
_MOST_IDS = 1 << 31  # a vocabulary that no row's token ids are beyond


def fewest_tokens(job: JobInput, defaults: SamplingParams) -> float:
    """Of prompt and answer: texts count by their characters, answers as far as they are likely to go. Raises what
    reading the rows raises."""
    tokens = []
    columns = list(dict.fromkeys((*job.source.columns, *job.param_columns.names)))
    shard = job.shard_set.shards[0]
    for batch in iter_rows(shard, 0, _SAMPLE_ROWS, [name for name in columns if name in shard.schema.names]):
        params = job.param_columns.parse(batch.table, defaults, _MOST_IDS)
        for value, own in zip(job.source.values(batch.table), params, strict=True):
            if isinstance(own, SamplingParams):
                tokens.append(_prompt_tokens(value) + _answer_tokens(own))
    return sum(tokens) / max(1, len(tokens))


def _answer_tokens(params: SamplingParams) -> int:
    if params.max_tokens is None:
        return _SURE_OUTPUT
    return params.max_tokens if params.never_stops else min(params.max_tokens, _SURE_OUTPUT)


def _prompt_tokens(value: Any) -> int:
    """Of a text, a list of token ids, or texts somewhere within lists and objects."""
    if isinstance(value, str):
        return len(value) // _TOKEN_CHARACTERS
    if isinstance(value, dict):
        return sum(map(_prompt_tokens, value.values()))
    if isinstance(value, list):
        return len(value) if value and isinstance(value[0], int) else sum(map(_prompt_tokens, value))
    return 0
