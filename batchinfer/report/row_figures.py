"""What the rows of an output add up to for the page: distributions, the slowest rows, examples of errors. One pass over
a few columns, in memory that does not grow with the rows. Used by write.py."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchinfer.data.json_lines import to_rows
from batchinfer.distribution import Distribution

DISTRIBUTIONS = (
    *("queue_ms", "prefill_ms", "ttft_ms", "tbt_mean_ms", "tbt_p99_ms", "tbt_max_ms", "latency_ms"),
    *("prompt_tokens", "completion_tokens"),
)
COLUMNS = (
    *("request_id", "finish_reason", "error_code", "error_message"),
    *("cached_prompt_tokens", "num_preemptions", *DISTRIBUTIONS),
)
NUM_SLOWEST = 20
NUM_EXAMPLES = 3  # of each error code
_EXACT_VALUES = 1 << 16


@dataclass(slots=True)
class RowFigures:
    """distributions: by column, over the rows that have a value. slowest: rows of the longest latency first; errors and
    slowest hold rows as dicts of COLUMNS with `number`, the output row from 0, and `input_id`."""

    num_rows: int = 0
    distributions: dict[str, Distribution] = field(
        default_factory=lambda: {name: Distribution(_EXACT_VALUES) for name in DISTRIBUTIONS}
    )
    slowest: list[dict[str, Any]] = field(default_factory=list)
    error_counts: dict[str, int] = field(default_factory=dict)
    error_examples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def add(self, batch: pa.RecordBatch) -> None:
        """The next rows of the output, with COLUMNS and input_id."""
        for name, distribution in self.distributions.items():
            distribution.add_many(batch[name].drop_null().to_numpy(zero_copy_only=False).astype(np.float64))
        numbers = pa.array(np.arange(self.num_rows, self.num_rows + batch.num_rows))
        numbered = batch.append_column("number", numbers)
        self._add_slowest(numbered)
        self._add_errors(numbered.filter(pc.equal(numbered["finish_reason"], "error")))
        self.num_rows += batch.num_rows

    def _add_slowest(self, batch: pa.RecordBatch) -> None:
        """Of a batch only rows that are slower than those held become Python values."""
        least = self.slowest[-1]["latency_ms"] if len(self.slowest) == NUM_SLOWEST else -1.0
        slower = batch.filter(pc.greater(batch["latency_ms"], least))
        order = pc.sort_indices(slower, [("latency_ms", "descending"), ("number", "ascending")])[:NUM_SLOWEST]
        rows = self.slowest + list(to_rows(slower.take(order)))
        self.slowest = sorted(rows, key=lambda row: (-row["latency_ms"], row["number"]))[:NUM_SLOWEST]

    def _add_errors(self, failed: pa.RecordBatch) -> None:
        for code in failed["error_code"].unique().to_pylist():
            own = failed.filter(pc.equal(failed["error_code"], code))
            self.error_counts[code] = self.error_counts.get(code, 0) + own.num_rows
            examples = self.error_examples.setdefault(code, [])
            examples += to_rows(own.slice(0, NUM_EXAMPLES - len(examples)))


def collect(batches: Iterable[pa.RecordBatch]) -> RowFigures:
    """Of a whole output."""
    figures = RowFigures()
    for batch in batches:
        figures.add(batch)
    return figures
