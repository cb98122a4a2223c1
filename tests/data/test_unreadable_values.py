"""Values that Python cannot represent: each is a fault of its row, with the column's name, and of no other."""

import pyarrow as pa
import pytest

from batchinfer.data.columns import Unreadable, column_values
from batchinfer.data.prompt_source import PromptSource
from batchinfer.data.row_params import ParamColumns
from batchinfer.errors import ErrorCode, RowError
from batchinfer.request import SamplingParams


def texts(*values: bytes) -> pa.Array:
    """Of a string column, whether they are UTF-8 or not."""
    offsets = pa.array([sum(map(len, values[:i])) for i in range(len(values) + 1)], pa.int32())
    return pa.StringArray.from_buffers(len(values), offsets.buffers()[1], pa.py_buffer(b"".join(values)))


def batch(**columns: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(list(columns.values()), list(columns))


@pytest.mark.parametrize(
    "column",
    [
        texts(b"a", b"\xff", b"c"),
        pa.array([0, 400_000_000_000_000, 1], pa.timestamp("ms")),
        pa.array([0, 10_000_000, 1], pa.date32()),
        pa.array([[0], [400_000_000_000_000], []], pa.list_(pa.timestamp("ms"))),
    ],
    ids=["text", "timestamp", "date", "list"],
)
def test_others_keep_their_values(column):
    values = column_values(batch(c=column), "c")
    assert isinstance(values[1], Unreadable)
    assert [values[0], values[2]] == [column[0].as_py(), column[2].as_py()]


def test_a_prompt_is_a_fault_of_its_row():
    table = batch(prompt=texts(b"a", b"\xc3", b"c"), other=pa.array([1, 2, 3]))
    first, fault, last = PromptSource("prompt", ("prompt",)).values(table)
    assert (first, last) == ("a", "c")
    assert isinstance(fault, RowError)
    assert (fault.code, "column `prompt` cannot be read: " in fault.message) == (ErrorCode.BAD_PROMPT, True)


def test_a_parameter_is_a_fault_of_its_row():
    columns = ParamColumns(("max_tokens", "stop"))
    table = batch(max_tokens=pa.array([1, 2, 3]), stop=texts(b"a", b"\xff", b"c"))
    first, fault, last = columns.parse(table, SamplingParams(), vocab_size=10)
    assert [first.stop, last.stop] == [("a",), ("c",)]
    assert isinstance(fault, RowError)
    assert (fault.code, "stop cannot be read: " in fault.message) == (ErrorCode.BAD_PARAMETER, True)
