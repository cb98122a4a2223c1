"""Sparse changes to logits: what each row wants to have biased, penalised and barred. Made by the engine's sampler,
applied by the sampling operation in that order."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowTokens:
    """Distinct tokens of each of n rows: those of row r are token_ids[offsets[r]:offsets[r + 1]].

    offsets: int64 [n + 1], from 0; token_ids: int64 [k], each below the vocabulary's size.
    """

    offsets: Tensor
    token_ids: Tensor


@dataclass(frozen=True, slots=True)
class Bias:
    """Adds values (float32 [k]) to the logits of `tokens`."""

    tokens: RowTokens
    values: Tensor


@dataclass(frozen=True, slots=True)
class Penalties:
    """tokens: every token of a row's prompt or output; output_counts: float32 [k], how often the token stands in the
    output (0: in the prompt only); repetition, presence, frequency: float32 [n].

    Repetition divides positive logits and multiplies the others; frequency, times the count, and presence are
    subtracted for output tokens.
    """

    tokens: RowTokens
    output_counts: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor


@dataclass(frozen=True, slots=True)
class LogitChanges:
    """Of n rows; None where no row has any. Biased and penalised logits are kept within 1e30, so that dividing by any
    allowed temperature stays finite; NaN stays NaN. Barred tokens become -inf."""

    bias: Bias | None
    penalties: Penalties | None
    barred: RowTokens | None
