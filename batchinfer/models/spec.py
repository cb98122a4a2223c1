"""What a decoder computes, as plain data: made by families/ from a config.json, read by decoder, attention, mlp and
rope. Free of torch, so that a configuration can be checked before anything heavy is imported."""

from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"]
Activation = Literal["silu", "gelu", "gelu_tanh"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding. Fields below `attention_factor` belong to the kinds named beside them."""

    kind: RopeKind
    theta: float
    rotary_dim: int  # leading dimensions of a head that are rotated
    max_position_embeddings: int
    attention_factor: float = 1.0  # multiplies cosines and sines (yarn, longrope)
    factor: float = 1.0  # linear, dynamic, yarn, llama3, proportional
    original_max_position_embeddings: int = 0  # yarn, longrope, llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    short_factor: tuple[float, ...] = ()  # longrope, [rotary_dim / 2]
    long_factor: tuple[float, ...] = ()  # longrope, [rotary_dim / 2]
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    rotated_fraction: float = 1.0  # proportional: share of rotary_dim with a frequency above 0

    @property
    def length_threshold(self) -> int | None:
        """Sequences up to this many tokens all have the same frequencies; those of longer ones depend on their length.
        None: frequencies never depend on it."""
        thresholds = {"dynamic": self.max_position_embeddings, "longrope": self.original_max_position_embeddings}
        return thresholds.get(self.kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """A pre-norm decoder with RMS norms, rotary positions and gated MLPs.

    Raises ValueError naming the field and the allowed values.
    """

    family: str  # config.json's model_type
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    activation: Activation
    rms_norm_eps: float
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    mlp_bias: bool
    qk_norm: bool  # an RMS norm on each head of queries and keys, before the rotation
    tie_word_embeddings: bool
    sliding_windows: tuple[int | None, ...]  # [num_layers] keys that a query sees, its own included; None: all
    rope: RopeSpec
    dtype: str | None  # the checkpoint's own precision (bf16, fp16, fp32); None where config.json does not say

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_q_heads", "num_kv_heads")
        for name in (*sizes, "head_dim", "max_position_embeddings"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)!r}: must be 1 or more")
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads = {self.num_kv_heads}: must divide num_q_heads ({self.num_q_heads})")
        if self.rope.rotary_dim % 2 or not 2 <= self.rope.rotary_dim <= self.head_dim:
            raise ValueError(f"rotary_dim = {self.rope.rotary_dim}: must be even, from 2 to head_dim ({self.head_dim})")
        if len(self.sliding_windows) != self.num_layers:
            raise ValueError(f"sliding_windows has {len(self.sliding_windows)} entries, not {self.num_layers}")
        if any(window is not None and window < 1 for window in self.sliding_windows):
            raise ValueError(
                f"sliding_window = {min(w for w in self.sliding_windows if w is not None)}: must be above 0"
            )
