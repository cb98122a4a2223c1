"""How long the answers of an earlier run were, as a forecast for the rows of this one. Read by the pipeline and by
planning/, handed to the prompt builder."""

import numpy as np

from batchinfer.data.read_output import check_parts, iter_results
from batchinfer.data.row_map import RowMap
from batchinfer.errors import UsageError
from batchinfer.request import RequestId

_NO_ANSWER = -1


class EarlierLengths:
    """Row by row, by the place of the row in the job: from the beginning again where the job has more rows, or a row
    more samples, than the output. 12 bytes an answer. Raises UsageError where `output` is none, has no rows, or lacks a
    part before its last."""

    def __init__(self, output: str, rows: RowMap) -> None:
        try:
            check_parts(output)
            batches = list(iter_results(output, ("sample_index", "completion_tokens")))
        except UsageError as error:
            raise UsageError(
                f"--lengths-from: {error} (wanted: the --output of an earlier run of these rows)"
            ) from error
        samples = [np.asarray(batch["sample_index"]) for batch in batches]
        tokens = [np.asarray(batch["completion_tokens"].fill_null(_NO_ANSWER)) for batch in batches]
        self._rows = rows
        self._tokens = np.concatenate([np.zeros(0, np.int32), *tokens]).astype(np.int32)
        self._starts = np.flatnonzero(np.concatenate([np.ones(0, np.int32), *samples]) == 0)
        if not len(self._starts):
            raise UsageError(f"--lengths-from {output}: it has no rows")

    def of(self, request_id: RequestId) -> int | None:
        """Tokens of the answer that stands where this one will; None where it is an error."""
        row = self._rows.position(request_id.shard, request_id.row) % len(self._starts)
        start = int(self._starts[row])
        stop = int(self._starts[row + 1]) if row + 1 < len(self._starts) else len(self._tokens)
        tokens = int(self._tokens[start + request_id.sample % (stop - start)])
        return None if tokens == _NO_ANSWER else tokens
