"""What is known of the keys of each layer whatever the text, turned to where they stand: the part that they have in
common, which an 8-bit cache need not hold, and how much an error in each dimension counts. Built by the decoder from
what engine/key_statistics.py measures, read by its attention layers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from batchinfer.kernels.common.key_offset import SEGMENT
from batchinfer.models.rope import RotaryEmbedding

KnownKeys = tuple[Tensor | None, Tensor | None]  # k_offset and k_weight of rotary_kv_store


@dataclass(frozen=True, slots=True)
class KeyStatistics:
    """Of a layer, before the rotation, each float32 [num_kv_heads, head_dim]."""

    mean: Tensor  # of the keys
    query_squares: Tensor  # mean squares of the queries that meet them
    query_products: Tensor  # of each dimension with the one that it is rotated with; zeros where it is not


class KeyOffsets:
    """Tables a layer: the mean key and the queries' squares, rotated to the positions of each SEGMENT of them and
    averaged there. One vector for all positions would fit a few hundred of them only, as slow dimensions turn."""

    def __init__(self, rope: RotaryEmbedding, statistics: Sequence[KeyStatistics | None]) -> None:
        """statistics: of each layer; None: it has no tables. The frequencies must not depend on the length."""
        self._rope = rope
        self._statistics = statistics
        self._num_segments = 0
        self._offsets = [None if s is None else s.mean.new_empty(0, *s.mean.shape) for s in statistics]
        self._weights = list(self._offsets)
        self._outgrown: list[Tensor] = []  # captured graphs go on reading the tables that they were captured with

    def cover(self, num_positions: int) -> None:
        """Makes the tables long enough. A segment's values do not depend on when it came."""
        missing = -(-num_positions // SEGMENT) - self._num_segments
        if missing <= 0:
            return
        added = range(self._num_segments, self._num_segments + max(missing, self._num_segments))
        turns = [self._turns(segment) for segment in added]
        mean_turns, squares = torch.stack([t.mean(0) for t in turns]), torch.stack([_squares(t) for t in turns])
        for layer, known in enumerate(self._statistics):
            offsets, weights = self._offsets[layer], self._weights[layer]
            if known is not None and offsets is not None and weights is not None:
                self._outgrown += (offsets, weights)
                self._offsets[layer] = torch.cat((offsets, turn(known.mean, mean_turns)))
                self._weights[layer] = torch.cat((weights, _weights(known, squares)))
        self._num_segments += len(added)

    def tables(self, layer: int) -> KnownKeys:
        """k_offset and k_weight of rotary_kv_store, of all positions asked for; the weights are 1 on average."""
        return self._offsets[layer], self._weights[layer]

    def _turns(self, segment: int) -> Tensor:
        """[SEGMENT, rotary_dim] as RotaryEmbedding.cos_sin."""
        return self._rope.cos_sin(torch.arange(segment * SEGMENT, (segment + 1) * SEGMENT, device=self._rope.device))


def turn(vectors: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotated vectors, [num_tokens, num_heads, head_dim]. vectors: of that shape, or [num_heads, head_dim], the same
    for all tokens; cos_sin: [num_tokens, rotary_dim]."""
    half = cos_sin.shape[-1] // 2
    cos, sin = cos_sin[:, None, :half], cos_sin[:, None, half:]
    first, second, rest = vectors[..., :half], vectors[..., half : 2 * half], vectors[..., 2 * half :]
    rest = rest.expand(len(cos_sin), *rest.shape[-2:])
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


def pair_products(vectors: Tensor, rotary_dim: int) -> Tensor:
    """Each dimension times the one that it is rotated with; zeros where it is not. In vectors' shape."""
    half = rotary_dim // 2
    products = vectors[..., :half] * vectors[..., half:rotary_dim]
    return torch.cat((products, products, torch.zeros_like(vectors[..., rotary_dim:])), -1)


def _squares(turns: Tensor) -> Tensor:
    """[3, rotary_dim / 2], means of cos^2, sin^2 and 2 cos sin."""
    cos, sin = turns.chunk(2, -1)
    return torch.stack((cos.square().mean(0), sin.square().mean(0), (2 * cos * sin).mean(0)))


def _weights(known: KeyStatistics, squares: Tensor) -> Tensor:
    """[num_segments, num_kv_heads, head_dim] from squares [num_segments, 3, rotary_dim / 2]: the mean squares of
    rotated queries. For x cos - y sin it is x^2 cos^2 + y^2 sin^2 - 2 xy cos sin, for y cos + x sin it is y^2 cos^2 +
    x^2 sin^2 + 2 xy cos sin."""
    half = squares.shape[-1]
    cos2, sin2, mixed = (squares[:, None, i] for i in range(3))
    first, second = known.query_squares[:, :half], known.query_squares[:, half : 2 * half]
    products = known.query_products[:, :half] * mixed
    rest = known.query_squares[:, 2 * half :].expand(len(squares), -1, -1)
    turned = (first * cos2 + second * sin2 - products, second * cos2 + first * sin2 + products, rest)
    weights = torch.cat(turned, -1).clamp_min(0)
    return weights / weights.mean(-1, keepdim=True)
