"""What tells one layer's attention from another's. Made by the public function, read by each backend."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Variant:
    """Checked by `validate`, which needs to know the queries' heads."""

    scale: float
    sliding_window: int | None = None  # tokens, a query's own included
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None  # float32 [num_q_heads]
    k_offset: torch.Tensor | None = None  # float32 [num_segments, num_kv_heads, head_dim], not in stored keys

    def validate(self, num_q_heads: int) -> None:
        """Raises ValueError on values that no attention has."""
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window = {self.sliding_window}: must be 1 or more")
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise ValueError(f"soft_cap = {self.soft_cap}: must be above 0")
        if self.sinks is not None and (self.sinks.shape != (num_q_heads,) or self.sinks.dtype != torch.float32):
            raise ValueError(f"sinks {self.sinks.dtype} {tuple(self.sinks.shape)}: must be float32 ({num_q_heads},)")
        if self.k_offset is not None and (self.soft_cap is not None or self.sinks is not None):
            raise ValueError("k_offset goes with neither soft_cap nor sinks")
