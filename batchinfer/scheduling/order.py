"""In which order the rows of a job start: equal beginnings together, long answers early, work of both kinds mixed.
Called by window.py, and by whoever wants to know the order of a whole job."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from batchinfer.scheduling.prefixes import TokenIds, sort_by_beginning

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

_SPREAD = 0.8  # share of the order over which answer-heavy rows are spread; behind it stand short answers only
_FEW = 4  # groups that are not worth mixing


def packed_order(
    prompts: Sequence[TokenIds],
    output_tokens: FloatArray,
    block_size: int,
    max_num_seqs: int,
    after: TokenIds | None = None,
) -> IntArray:
    """The order in which to start the prompts, as indices.

    Depth first over the tree of shared full KV blocks, so that all rows under a beginning stand together: it is
    computed once, and needed no more once the last of them has started. The children of a node stand by falling
    longest expected answer, so that no long one is left for the end, when the batch runs empty; and those in which
    answers outweigh prompts are spread among the others, so that steps have work of both kinds. A row that would
    outlast the job from where it stands starts at once, outside its group. Equals keep their order.

    output_tokens: of the expected answer of each [num_prompts]. after: a prompt whose blocks are in the cache; the rows
    that share most of it come first.
    """
    if len(prompts) < 2:
        return np.arange(len(prompts))
    rows = prompts if after is None else [*prompts, after]
    order, shared = sort_by_beginning(rows, block_size)
    lengths = np.fromiter((len(prompt) for prompt in rows), np.int64, len(rows))
    outputs = output_tokens if after is None else np.append(output_tokens, 0.0)
    first = None if after is None else int(np.flatnonzero(order == len(prompts))[0])
    placed = order[_arrange(_Rows(order, shared, lengths[order], outputs[order], block_size), first)]
    return _lift_outliers(placed[placed < len(prompts)], output_tokens, max_num_seqs)


class _Rows:
    """The rows sorted by their beginnings, one entry each."""

    def __init__(
        self, index: IntArray, shared: IntArray, lengths: IntArray, output_tokens: FloatArray, block_size: int
    ) -> None:
        self.index = index  # in the order given
        self.shared = shared  # full blocks that it has in common with the row before it
        self.prompt_tokens = lengths - shared * block_size  # to compute, after the row before it
        self.output_tokens = output_tokens
        self.block_size = block_size


def _arrange(rows: _Rows, first: int | None) -> IntArray:
    """Places of the sorted rows in their order. first: the row whose groups come first."""
    places = np.empty(len(rows.index), np.int64)
    nodes = [(0, len(rows.index), 0)]  # rows [start, stop), which go to places[at:]
    while nodes:
        start, stop, at = nodes.pop()
        if stop - start == 2:
            second_leads = _leads(rows, start + 1, start, first)
            places[at : at + 2] = (start + 1, start) if second_leads else (start, start + 1)
            continue
        starts, stops = _children(rows, start, stop)
        order = _order_of_children(rows, starts, stops, first)
        starts, sizes = starts[order], (stops - starts)[order]
        targets = at + np.cumsum(sizes) - sizes
        single = sizes == 1
        places[targets[single]] = starts[single]
        groups = ~single
        nodes += zip(starts[groups].tolist(), (starts + sizes)[groups].tolist(), targets[groups].tolist(), strict=True)
    return places


def _leads(rows: _Rows, one: int, other: int, first: int | None) -> bool:
    """Whether the one row stands before the other, of two that share all that they share with any other."""
    if first in (one, other):
        return first == one
    outputs = rows.output_tokens
    if outputs[one] != outputs[other]:
        return bool(outputs[one] > outputs[other])
    return bool(rows.index[one] < rows.index[other])


def _children(rows: _Rows, start: int, stop: int) -> tuple[IntArray, IntArray]:
    """The groups, [starts, stops), of rows that have more in common than all of [start, stop) have."""
    inner = rows.shared[start + 1 : stop]
    splits = start + 1 + np.flatnonzero(inner == inner.min())
    return np.concatenate([[start], splits]), np.concatenate([splits, [stop]])


def _order_of_children(rows: _Rows, starts: IntArray, stops: IntArray, first: int | None) -> IntArray:
    """The order of groups that stand side by side."""
    begin, end = int(starts[0]), int(stops[-1])
    inner = starts - begin
    longest = np.maximum.reduceat(rows.output_tokens[begin:end], inner)
    earliest = np.minimum.reduceat(rows.index[begin:end], inner)
    order = np.lexsort((earliest, -longest))
    if len(starts) > _FEW:
        answers = np.add.reduceat(rows.output_tokens[begin:end], inner)[order]
        prompts = np.add.reduceat(rows.prompt_tokens[begin:end], inner)
        common = int(rows.shared[starts[1]])  # which no group computes: the first row of all has
        prompts[0] -= (common - rows.shared[begin]) * rows.block_size
        order = order[_mix(answers, prompts[order])]
    if first is not None and begin <= first < end:
        holds = (starts[order] <= first) & (first < stops[order])
        order = np.concatenate([order[holds], order[~holds]])
    return order


def _mix(answers: FloatArray, prompts: IntArray) -> IntArray:
    """Spreads what is heavy in answers over the first part of what is heavy in prompts, each kind in its order, in
    proportion to the work. answers, prompts: tokens of each group."""
    is_heavy = answers * prompts.sum() > prompts * answers.sum()
    work = answers + prompts
    place = np.empty(len(work))
    for kind, spread in ((is_heavy, _SPREAD), (~is_heavy, 1.0)):
        done = np.cumsum(work[kind])
        place[kind] = spread * (done - work[kind]) / max(1.0, done[-1] if len(done) else 0.0)
    return np.argsort(place, kind="stable")


def _lift_outliers(order: IntArray, output_tokens: FloatArray, max_num_seqs: int) -> IntArray:
    """Takes to the front the rows whose answers would still run when all others have ended: those of at least twice the
    mean length that end, in a batch which is always full, later than all the work by more than the mean."""
    lengths = output_tokens[order]
    num_running = max(1, min(max_num_seqs, len(order)))
    mean, total = lengths.mean(), lengths.sum() / num_running
    ends = (np.cumsum(lengths) - lengths) / num_running + lengths
    is_outlier = (lengths >= 2 * mean) & (ends > total + mean)
    outliers = order[is_outlier]
    outliers = outliers[np.argsort(-output_tokens[outliers], kind="stable")]
    return np.concatenate([outliers, order[~is_outlier]])
