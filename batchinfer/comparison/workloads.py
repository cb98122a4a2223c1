"""The jobs on which `--confirm` measures: rows of token ids and lengths drawn by a seed, equal on every machine. Pure
but for write; called by confirm.py."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SEED = 0


@dataclass(frozen=True, slots=True)
class Workload:
    """Rows with `prompt_token_ids` and `max_tokens`, all of which are to be generated. description: of the rows, in
    words."""

    name: str
    description: str
    rows: Sequence[dict[str, Any]]

    @property
    def longest(self) -> int:
        """Most tokens of a row, prompt and completion."""
        return max(_num_tokens(row) for row in self.rows)

    def write(self, folder: Path) -> Path:
        """The rows as a .jsonl file in the folder."""
        path = folder / f"{self.name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in self.rows), encoding="utf-8")
        return path


def heavy_tail(vocab_size: int) -> Workload:
    """Completions of 8 to 256 tokens, of which P(length > x) = 8 / x: half have 16 or fewer, and the longest tenth
    has half of all tokens."""
    num_rows, prompt_len, shortest, longest = 72, 16, 8, 256
    drawn = random.Random(_SEED)
    shares = [(row + 0.5) / num_rows for row in range(num_rows)]
    lengths = [min(longest, round(shortest / (1 - share))) for share in shares]
    drawn.shuffle(lengths)
    rows = [_row(_tokens(drawn, prompt_len, vocab_size), length) for length in lengths]
    mean = sum(lengths) / num_rows
    words = f"{num_rows} prompts of {prompt_len} tokens, {shortest} to {longest} out (mean {mean:.0f}, heavy tail)"
    return Workload("heavy_tail", words, rows)


def shared_prefixes(vocab_size: int) -> Workload:
    """Chats under a few system prompts, in random order."""
    num_rows, num_prefixes, prefix_len, own_len, max_tokens = 48, 8, 400, 24, 16
    drawn = random.Random(_SEED)
    prefixes = [_tokens(drawn, prefix_len, vocab_size) for _ in range(num_prefixes)]
    rows = [
        _row(prefixes[row % num_prefixes] + _tokens(drawn, own_len, vocab_size), max_tokens) for row in range(num_rows)
    ]
    drawn.shuffle(rows)
    words = (
        f"{num_rows} prompts of {own_len} tokens, each after one of {num_prefixes} beginnings of {prefix_len}, "
        f"shuffled, {max_tokens} out"
    )
    return Workload("shared_prefixes", words, rows)


def even_lengths(vocab_size: int, num_rows: int) -> Workload:
    """Rows that are alike, so that memory or --max-num-seqs alone decides how many run at once."""
    prompt_len, max_tokens = 64, 64
    drawn = random.Random(_SEED)
    rows = [_row(_tokens(drawn, prompt_len, vocab_size), max_tokens) for _ in range(num_rows)]
    words = f"{num_rows} prompts of {prompt_len} tokens, {max_tokens} out"
    return Workload(f"even_lengths_{num_rows}", words, rows)


def distinct_tokens(workload: Workload, block_size: int) -> int:
    """Tokens of the whole job when each beginning that rows share in whole blocks counts once: its working set."""
    seen: set[tuple[int, ...]] = set()
    total = 0
    for row in workload.rows:
        prompt: list[int] = row["prompt_token_ids"]
        beginnings = [tuple(prompt[:end]) for end in range(block_size, len(prompt) + 1, block_size)]
        shared = sum(beginning in seen for beginning in beginnings)
        seen.update(beginnings)
        total += _num_tokens(row) - shared * block_size
    return total


def _num_tokens(row: dict[str, Any]) -> int:
    return len(row["prompt_token_ids"]) + int(row["max_tokens"])


def _row(prompt: list[int], max_tokens: int) -> dict[str, Any]:
    return {"prompt_token_ids": prompt, "max_tokens": max_tokens}


def _tokens(drawn: random.Random, count: int, vocab_size: int) -> list[int]:
    return [drawn.randrange(vocab_size) for _ in range(count)]
