"""Attention over a captured step of more rows than sequences, under the interpreter as triton_interpreted.py is."""

import math

import torch
from batchinfer.kernels.paged_attention import gpu
from batchinfer.kernels.paged_attention.variant import Variant
from triton_interpreted_attention import Case, dense


def test_rows_of_length_0_are_not_looked_up_and_change_nothing():
    """Case 50: three sequences in a graph for eight. The other rows hold NaN and block ids of nowhere."""
    lengths, nowhere = [37, 1100, 5], 1 << 30
    case = Case(lengths, 4, 2, 32)
    width = max(len(table) for table in case.tables) + 3  # that of the graph
    table = torch.full((8, width), nowhere).int()
    for row, blocks in enumerate(case.tables):
        table[row, : len(blocks)] = torch.tensor(blocks)
    q = torch.full((8, 4, 32), math.nan)
    q[:3] = torch.stack([case.q[row][-1] for row in range(3)])
    attended = gpu.paged_attention(
        *(q, case.k_cache, case.v_cache, table, torch.arange(9).int()),
        *(torch.tensor([*lengths, 0, 0, 0, 0, 0]).int(), None, None, Variant(32**-0.5)),
    )
    for row in range(3):
        expected = dense(case.q[row], case.k[row], case.v[row])[-1]
        torch.testing.assert_close(attended[row].double(), expected, rtol=1e-5, atol=1e-5)
