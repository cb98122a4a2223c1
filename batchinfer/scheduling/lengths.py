"""How long answers become: at first up to what is allowed, then as those of like requests that have run. Fed by the
scheduler; read by the order of a job and by admission."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from batchinfer.request import MAX_LENGTH_GROUPS, NO_VALUE, Request

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

_EXACT = 0  # the class of requests that nothing but max_tokens ends
_NO_VALUE = 1  # of all that are of group NO_VALUE
_FIRST_LEARNT = 2
_MAX_CLASSES = _FIRST_LEARNT + MAX_LENGTH_GROUPS  # is of all that come when the others are taken
_PRIOR_MEAN_TOKENS = 4096.0  # where nothing has ended yet, and more is allowed
_PRIOR_SEQUENCES = 4.0  # how many finished requests the prior counts for, and all requests for those of one class
_TRUSTED_SHARE = 0.9  # of the answers, that are as long as an earlier run told
_FEW_BEYOND, _SHARE_BEYOND = 2, 0.1  # answers, and of all, that may run on before an earlier run is believed no more
_SMALLEST_CHANGE = 4  # endings after which the figures are worked out anew, at least
_NEVER = 1e3  # a cumulative hazard that no draw reaches
# Rising lengths (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 14, ...) between which the rate of ending is constant.
_EDGES = np.unique(np.ceil(2.0 ** (np.arange(0, 22 * 4) / 4))).astype(np.float64)
_EDGES = np.concatenate([[0.0], _EDGES])
_WIDTHS = np.diff(_EDGES)
_LOOKED_UP = 1 << 16  # lengths below this are found in a table
_BIN_OF = np.searchsorted(_EDGES, np.arange(_LOOKED_UP), side="right") - 1


class _Lines(NamedTuple):
    """Pieces of straight lines: from x = starts[i] on, the height is heights[i] + slopes[i] * (x - starts[i])."""

    starts: FloatArray
    heights: FloatArray
    slopes: FloatArray

    def at(self, pieces: IntArray, x: npt.NDArray[np.number]) -> FloatArray:
        """Heights at x, which piece pieces[i] holds for x[i]."""
        height: FloatArray = self.heights[pieces] + self.slopes[pieces] * (x - self.starts[pieces])
        return height


class OutputLengths:
    """Survival curves of answers, one for each class of requests: those of one length_group, else those of about
    equally long prompts and limits.

    Of the answers that came to a length, running ones included, a curve counts the share that ended before the next:
    so long answers that still run count, and the early endings at a job's start mislead nobody (an actuary's life
    table). Answers that max_tokens cut off count as ones that went on. Classes with few endings lean on all, and all on
    a constant rate of ending, which at first is low.
    """

    def __init__(self) -> None:
        self._classes: dict[tuple[int, int] | str, int] = {}
        self._endings = np.zeros((_MAX_CLASSES + 1, len(_WIDTHS)))
        self._entered = np.zeros_like(self._endings)  # finished answers that came so far
        self._ended: list[tuple[int, int, bool]] = []  # of add(), not yet in both
        self._num_told = self._num_as_told = self._num_beyond = 0  # answers that have ended
        self._num_ended = 0
        self._num_ended_at_update = 0
        self.update(np.zeros(0, np.int64), np.zeros(0, np.int64))

    @property
    def num_ended(self) -> int:
        return self._num_ended

    @property
    def is_stale(self) -> bool:
        """Whether enough answers have ended to work out the curves anew."""
        change = max(_SMALLEST_CHANGE, self._num_ended_at_update // 16)
        return self._num_ended - self._num_ended_at_update >= change

    def class_of(self, request: Request) -> int:
        if request.params.never_stops:
            return _EXACT
        if request.length_group == NO_VALUE:
            return _NO_VALUE
        alike = request.num_prompt_tokens.bit_length(), request.max_tokens.bit_length()
        key = alike if request.length_group is None else request.length_group
        if len(self._classes) < MAX_LENGTH_GROUPS:
            self._classes.setdefault(key, _FIRST_LEARNT + len(self._classes))
        return self._classes.get(key, _MAX_CLASSES)

    @property
    def trusts_earlier_runs(self) -> bool:
        """Whether answers so far became just as long as an earlier run's."""
        return self._num_as_told >= _TRUSTED_SHARE * (self._num_told + 1)

    def believes_earlier_runs(self, num_beyond: int) -> bool:
        """Whether few answers run on beyond what an earlier run told. num_beyond: of those that run, how many do."""
        beyond = self._num_beyond + num_beyond
        return beyond <= _FEW_BEYOND + _SHARE_BEYOND * (self._num_told + num_beyond)

    def add(self, length_class: int, num_tokens: int, is_cut: bool, expected_tokens: int | None = None) -> None:
        """An answer has ended after num_tokens, where max_tokens cut it (is_cut) or before. expected_tokens: what an
        earlier run told."""
        self._num_told += expected_tokens is not None
        self._num_as_told += expected_tokens == num_tokens
        self._num_beyond += expected_tokens is not None and num_tokens > expected_tokens
        if length_class != _EXACT:
            self._num_ended += 1
            self._ended.append((length_class, num_tokens, is_cut))

    def update(self, classes: IntArray, num_tokens: IntArray) -> None:
        """Works out the curves. classes, num_tokens: of the answers that run, so far."""
        self._take_in_ended()
        num_curves = _FIRST_LEARNT + len(self._classes) + 1  # the last is that of all classes yet to come
        entered = self._entered[:num_curves] + _passed(classes, num_tokens, num_curves)
        endings = self._endings[:num_curves]
        of_all = entered[1:].sum(0)
        constant = (1 + endings.sum()) / (_PRIOR_MEAN_TOKENS + (of_all * _WIDTHS).sum())  # endings a token
        common = _share(endings.sum(0), of_all, 1 - np.exp(-constant * _WIDTHS))
        ending = _share(endings, entered, common)  # share of the answers that end between two edges
        ending[_EXACT] = 0
        hazard = np.zeros((len(ending), len(_EDGES)))  # cumulative, at the edges; its exponential is survival
        np.cumsum(-np.log1p(-np.minimum(ending, 1 - 1e-9)), axis=1, out=hazard[:, 1:])
        np.minimum(hazard, _NEVER / 2, out=hazard)
        survival = np.exp(-hazard)
        mean = np.zeros_like(hazard)  # tokens generated up to each edge, on average
        np.cumsum((survival[:, 1:] + survival[:, :-1]) / 2 * _WIDTHS, axis=1, out=mean[:, 1:])
        self._hazard, self._mean, self._length = _lines(hazard), _lines(mean), _inverted(hazard)
        self._rising = (hazard + _NEVER * np.arange(num_curves)[:, None]).ravel()  # all curves in one
        self._num_curves = num_curves
        self._num_ended_at_update = self._num_ended

    def _take_in_ended(self) -> None:
        if not self._ended:
            return
        classes, num_tokens, cut = np.array(self._ended, np.int64).T
        is_cut = cut != 0
        self._ended.clear()
        self._entered += _passed(classes, num_tokens, len(self._entered))
        classes, num_tokens = classes[~is_cut], num_tokens[~is_cut]
        last = _bins(num_tokens - 1)
        np.add.at(self._entered, (classes, last), 1 - np.minimum(1, (num_tokens - _EDGES[last]) / _WIDTHS[last]))
        np.add.at(self._endings, (classes, last), 1)

    def expected(self, requests: Sequence[Request]) -> FloatArray:
        """Mean length of the answers to requests that have not begun [num_requests]."""
        classes = np.array([self.class_of(request) for request in requests], np.int64)
        classes = np.minimum(classes, self._num_curves - 1)
        limits = np.array([request.max_tokens for request in requests], np.int64)
        learnt = self._mean.at(len(_WIDTHS) * classes + _bins(limits), limits)
        told = np.array([-1 if r.expected_tokens is None else r.expected_tokens for r in requests], np.float64)
        learnt[told >= 0] = told[told >= 0]
        return learnt

    def remaining(self, classes: IntArray, num_tokens: IntArray, max_tokens: IntArray, levels: FloatArray) -> IntArray:
        """The tokens that each answer will still generate after num_tokens: the length that a share `levels` of the
        answers which came so far exceeds, at least one more where it may have one. levels: above 0, below 1; even
        levels over several answers give a set as it will typically be, long and short ones."""
        classes = np.minimum(classes, self._num_curves - 1)
        target = self._hazard.at(len(_WIDTHS) * classes + _bins(num_tokens), num_tokens) - np.log(levels)
        found = self._rising.searchsorted(target + _NEVER * classes)
        length = self._length.at(found + classes, target)
        length = np.minimum(np.maximum(np.ceil(length), num_tokens + 1), max_tokens)
        return np.maximum(length - num_tokens, 0).astype(np.int64)


def _lines(curves: FloatArray) -> _Lines:
    """curves: [num_curves, num_edges], at the edges."""
    starts = np.tile(_EDGES[:-1], len(curves))
    return _Lines(starts, curves[:, :-1].ravel(), (np.diff(curves) / _WIDTHS).ravel())


def _inverted(hazard: FloatArray) -> _Lines:
    """Lengths by the hazard [num_curves, num_edges], with a piece before each curve's first edge, which is like the one
    after it, and one behind its last, where answers have no end."""
    rise = np.maximum(np.diff(hazard), 1e-12)
    shape = (len(hazard), len(_EDGES) + 1)
    starts, heights, slopes = np.zeros(shape), np.full(shape, np.inf), np.zeros(shape)
    starts[:, 1:-1], heights[:, 1:-1], slopes[:, 1:-1] = hazard[:, :-1], _EDGES[:-1], _WIDTHS / rise
    heights[:, 0], slopes[:, 0] = heights[:, 1], slopes[:, 1]  # and both start at 0
    return _Lines(starts.ravel(), heights.ravel(), slopes.ravel())


def _bins(lengths: IntArray) -> IntArray:
    """The bin in which the token after each length falls."""
    if lengths.max(initial=0) < _LOOKED_UP:
        return _BIN_OF[lengths]
    return np.minimum(np.searchsorted(_EDGES, lengths, side="right") - 1, len(_WIDTHS) - 1)


def _passed(classes: IntArray, num_tokens: IntArray, num_classes: int) -> FloatArray:
    """How much of the way between each two edges the answers of each class have come, added up [num_classes,
    num_bins]."""
    bins = _bins(num_tokens)
    place, shape = classes * len(_WIDTHS) + bins, (num_classes, len(_WIDTHS))
    share = np.minimum(1, (num_tokens - _EDGES[bins]) / _WIDTHS[bins])
    passed = np.bincount(place, share, num_classes * len(_WIDTHS)).reshape(shape).astype(np.float64)
    here = np.bincount(place, minlength=num_classes * len(_WIDTHS)).reshape(shape)
    passed += np.cumsum(here[:, ::-1], axis=1)[:, ::-1] - here
    return passed


def _share(endings: FloatArray, entered: FloatArray, prior: FloatArray) -> FloatArray:
    """endings / entered, after _PRIOR_SEQUENCES more of which the share `prior` ended."""
    return (endings + _PRIOR_SEQUENCES * prior) / (entered + _PRIOR_SEQUENCES)
