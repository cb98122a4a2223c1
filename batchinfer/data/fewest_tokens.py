"""How many tokens a row of a job will at least have in the mean, guessed from the first ones before there is a
tokenizer. Called by the pipeline, to ask for the cache's memory early."""

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import compress, pairwise
from typing import Any

from batchinfer.data.job_input import JobInput
from batchinfer.data.readers import iter_rows
from batchinfer.request import SamplingParams

_SAMPLE_ROWS = 64
_TOKEN_CHARACTERS = 4  # of most texts, or fewer
# More or less as tokenizers cut a text before they code it: a chat's mark, a word, digits, other signs, spaces.
_PIECE = re.compile(r"<\|\w+\|>| ?[^\W\d_]+|\d{1,3}| ?(?:_|[^\s\w])+|\s+")
_SURE_OUTPUT = 64  # tokens of an answer that may end by itself
_MOST_IDS = 1 << 31  # a vocabulary that no row's token ids are beyond

Prompt = str | list[int]


def fewest_tokens(job: JobInput, defaults: SamplingParams, longest: int, block_size: int | None = None) -> float:
    """Of prompt and answer: texts count by their characters or words, answers as far as they are likely to go.
    longest: most tokens of a row; one whose prompt leaves no room in them holds none. block_size: of the blocks that
    rows hold together as far as they begin alike; they do not count. None: each holds its own. Raises what reading the
    rows raises."""
    prompts, answers = list[Prompt](), list[int]()
    columns = list(dict.fromkeys((*job.source.columns, *job.param_columns.names)))
    shard = job.shard_set.shards[0]
    for batch in iter_rows(shard, 0, _SAMPLE_ROWS, [name for name in columns if name in shard.schema.names]):
        params = job.param_columns.parse(batch.table, defaults, _MOST_IDS)
        for value, own in zip(job.source.values(batch.table), params, strict=True):
            if isinstance(own, SamplingParams):
                prompts.append(_flat(value))
                answers.append(_answer_tokens(own))
    measure = _measure(prompts)
    sizes = list(map(measure, prompts))
    held = [size < longest for size in sizes]
    total = sum(min(size + answer, longest) for size, answer in compress(zip(sizes, answers, strict=True), held))
    if block_size is not None:
        beginnings = map(measure, _shared_beginnings(list(compress(prompts, held))))
        total -= block_size * sum(_whole_blocks(tokens, block_size) for tokens in beginnings)
    return total / max(1, len(prompts))


def _whole_blocks(tokens: float, block_size: int) -> int:
    """Of a guess that may be half a block too high."""
    return max(0, int(tokens - block_size / 2) // block_size)


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


def _measure(prompts: Sequence[Prompt]) -> Callable[[Prompt], float]:
    """What counts a prompt's tokens: of texts the pieces where they all have more of them than their characters
    tell."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    has_many_pieces = sum(map(_num_pieces, texts)) > sum(map(len, texts)) / _TOKEN_CHARACTERS

    def num_tokens(prompt: Prompt) -> float:
        if not isinstance(prompt, str):
            return len(prompt)
        return _num_pieces(prompt) if has_many_pieces else len(prompt) / _TOKEN_CHARACTERS

    return num_tokens


def _num_pieces(text: str) -> int:
    return sum(1 for _ in _PIECE.finditer(text))


def _shared_beginnings(prompts: Sequence[Prompt]) -> Iterator[Prompt]:
    """With what each prompt begins like another: sorted, like ones are neighbours."""
    for kind in (str, list):
        alike = sorted(prompt for prompt in prompts if isinstance(prompt, kind))
        common = [0, *(_num_common(*pair) for pair in pairwise(alike)), 0]
        for prompt, lengths in zip(alike, pairwise(common), strict=False):
            yield prompt[: max(lengths)]


def _num_common(a: Prompt, b: Prompt) -> int:
    """Characters or tokens with which both begin."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
