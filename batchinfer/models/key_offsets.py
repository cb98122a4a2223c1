"""What the keys of each layer have in common whatever the text, turned to where they stand: what an 8-bit cache need
not hold. Built by the decoder from the means that engine/key_offsets.py measures, read by its attention layers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from batchinfer.kernels.common.key_offset import SEGMENT
from batchinfer.models.rope import RotaryEmbedding


class KeyOffsets:
    """A table a layer of the mean key, rotated to the positions of each SEGMENT of them and averaged there. One vector
    for all positions would fit a few hundred of them only, as slow dimensions turn."""

    def __init__(self, rope: RotaryEmbedding, means: Sequence[Tensor | None]) -> None:
        """means: of each layer, float32 [num_kv_heads, head_dim], the mean key before its rotation; None: the layer has
        no offsets. The frequencies must not depend on the length."""
        self._rope = rope
        self._means = means
        self._tables = [None if mean is None else mean.new_empty(0, *mean.shape) for mean in means]
        self._num_segments = 0

    def cover(self, num_positions: int) -> None:
        """Makes the tables long enough. A segment's values do not depend on when it came."""
        missing = -(-num_positions // SEGMENT) - self._num_segments
        if missing <= 0:
            return
        added = range(self._num_segments, self._num_segments + max(missing, self._num_segments))
        turns = torch.stack([self._mean_turn(segment) for segment in added])
        for layer, (mean, table) in enumerate(zip(self._means, self._tables, strict=True)):
            if mean is not None and table is not None:
                self._tables[layer] = torch.cat((table, turn(mean, turns)))
        self._num_segments += len(added)

    def table(self, layer: int) -> Tensor | None:
        """float32 [num_segments, num_kv_heads, head_dim], contiguous, of all positions covered; None: no offsets."""
        return self._tables[layer]

    def _mean_turn(self, segment: int) -> Tensor:
        """[rotary_dim] as RotaryEmbedding.cos_sin, averaged over the segment's positions."""
        positions = torch.arange(segment * SEGMENT, (segment + 1) * SEGMENT, device=self._rope.device)
        return self._rope.cos_sin(positions).mean(0)


def turn(keys: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotated keys, [num_tokens, num_kv_heads, head_dim]. keys: of that shape, or [num_kv_heads, head_dim], the same
    for all tokens; cos_sin: [num_tokens, rotary_dim]."""
    half = cos_sin.shape[-1] // 2
    cos, sin = cos_sin[:, None, :half], cos_sin[:, None, half:]
    first, second, rest = keys[..., :half], keys[..., half : 2 * half], keys[..., 2 * half :]
    rest = rest.expand(len(cos_sin), *rest.shape[-2:])
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)
