"""How many tokens a row of a job will at least have in the mean, guessed from the first ones before there is a
tokenizer. Called by the pipeline, to ask for the cache's memory early."""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from batchinfer.data.job_input import JobInput
from batchinfer.data.readers import iter_rows
from batchinfer.request import SamplingParams

_SAMPLE_ROWS = 64
_TOKEN_CHARACTERS = 4  # of most texts, or fewer
# What no token reaches beyond, in most vocabularies: a chat's mark, a word, a digit, a run of other signs or of spaces.
_PIECE = re.compile(r"<\|\w+\|>| ?[^\W\d_]+|\d| ?(?:_|[^\s\w])+|\s+")
_SHARED_CHARACTERS = 5  # of a token that counts as shared: of few texts more
_SURE_OUTPUT = 64  # tokens of an answer that may end by itself
_MOST_IDS = 1 << 31  # a vocabulary that no row's token ids are beyond

Prompt = str | list[int]


def fewest_tokens(job: JobInput, defaults: SamplingParams, block_size: int | None = None) -> float:
    """Of prompt and answer: texts count by their characters or words, answers as far as they are likely to go.
    block_size: of the blocks that rows hold together as far as they begin alike; they do not count. None: each holds
    its own. Raises what reading the rows raises."""
    prompts, answers = list[Prompt](), list[int]()
    columns = list(dict.fromkeys((*job.source.columns, *job.param_columns.names)))
    shard = job.shard_set.shards[0]
    for batch in iter_rows(shard, 0, _SAMPLE_ROWS, [name for name in columns if name in shard.schema.names]):
        params = job.param_columns.parse(batch.table, defaults, _MOST_IDS)
        for value, own in zip(job.source.values(batch.table), params, strict=True):
            if isinstance(own, SamplingParams):
                prompts.append(_flat(value))
                answers.append(_answer_tokens(own))
    tokens = _num_tokens(prompts) + sum(answers)
    if block_size is not None:
        tokens -= sum(shared // block_size * block_size for shared in _shared_tokens(prompts))
    return tokens / max(1, len(prompts))


def _answer_tokens(params: SamplingParams) -> int:
    if params.max_tokens is None:
        return _SURE_OUTPUT
    return params.max_tokens if params.never_stops else min(params.max_tokens, _SURE_OUTPUT)


def _flat(value: Any) -> Prompt:
    """A text, a list of token ids, or the texts somewhere within lists and objects, one after the other."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and isinstance(value[0], int):
        return value
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return "".join(part for part in map(_flat, parts) if isinstance(part, str))


def _num_tokens(prompts: Sequence[Prompt]) -> int:
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    by_characters = sum(map(len, texts)) // _TOKEN_CHARACTERS
    by_pieces = sum(1 for text in texts for _ in _PIECE.finditer(text))
    return max(by_characters, by_pieces) + sum(len(prompt) for prompt in prompts if isinstance(prompt, list))


def _num_common(a: Prompt, b: Prompt) -> int:
    """Characters or tokens with which both begin."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _shared_tokens(prompts: Sequence[Prompt]) -> list[int]:
    """With how many of its first tokens each prompt begins like another, at least: sorted, like ones are neighbours."""
    shared = []
    for kind in (str, list):
        alike = sorted(prompt for prompt in prompts if isinstance(prompt, kind))
        common = [0, *(_num_common(*pair) for pair in pairwise(alike)), 0]
        characters = _SHARED_CHARACTERS if kind is str else 1
        shared += [max(common[i : i + 2]) // characters for i in range(len(alike))]
    return shared
