"""Cosines and sines of the rotary embedding for the tokens of a batch. Called by the decoder once a forward pass.

The formulas follow transformers' modeling_rope_utils step by step in float32, because at position 60,000 the last bit
of a frequency is an angle that one can see.
"""

import math

import torch
from torch import Tensor

from batchinfer.models.spec import RopeSpec


class RotaryEmbedding:
    """Frequencies of one RopeSpec on a device."""

    def __init__(self, spec: RopeSpec, device: torch.device) -> None:
        self.spec = spec
        self.device = device
        self._exponents = torch.arange(0, spec.rotary_dim, 2, device=device).float() / spec.rotary_dim
        self._frequencies = _FORMULAS[spec.kind](spec, self._exponents)  # of sequences up to spec.length_threshold
        if spec.kind == "longrope":
            long_factor = torch.tensor(spec.long_factor, device=device)
            self._long_frequencies = 1.0 / (long_factor * spec.theta**self._exponents)

    def cos_sin(self, positions: Tensor, lengths: Tensor | None = None) -> Tensor:
        """float32 [num_tokens, rotary_dim]: cosines, then sines, times the attention factor.

        positions: int64 [num_tokens]. lengths: int64 [num_tokens], the length of the sequence by which dynamic and
        longrope choose their frequencies; the other kinds ignore it. None: position + 1.
        """
        frequencies = self._frequencies
        threshold = self.spec.length_threshold
        if threshold is not None:
            frequencies = self._frequencies_by_length(positions + 1 if lengths is None else lengths, threshold)
        angles = positions[:, None].float() * frequencies
        return torch.cat((angles.cos(), angles.sin()), dim=-1) * self.spec.attention_factor

    def _frequencies_by_length(self, lengths: Tensor, threshold: int) -> Tensor:
        """[num_tokens, rotary_dim / 2]"""
        spec = self.spec
        is_long = (lengths > threshold)[:, None]
        if spec.kind == "longrope":
            return torch.where(is_long, self._long_frequencies, self._frequencies)
        growth = spec.factor * lengths.clamp_min(threshold) / spec.max_position_embeddings - (spec.factor - 1)
        theta = spec.theta * growth ** (spec.rotary_dim / (spec.rotary_dim - 2))
        return torch.where(is_long, 1.0 / theta[:, None] ** self._exponents, self._frequencies)


def _default(spec: RopeSpec, exponents: Tensor) -> Tensor:
    return 1.0 / spec.theta**exponents


def _linear(spec: RopeSpec, exponents: Tensor) -> Tensor:
    return _default(spec, exponents) / spec.factor


def _proportional(spec: RopeSpec, exponents: Tensor) -> Tensor:
    """The first part of the dimensions turns, the rest stands still."""
    frequencies = _default(spec, exponents)
    frequencies[int(spec.rotated_fraction * spec.rotary_dim // 2) :] = 0.0
    return frequencies / spec.factor


def _longrope(spec: RopeSpec, exponents: Tensor) -> Tensor:
    """Source: Ding et al., arXiv 2402.13753."""
    return 1.0 / (torch.tensor(spec.short_factor, device=exponents.device) * spec.theta**exponents)


def _yarn(spec: RopeSpec, exponents: Tensor) -> Tensor:
    """Fast dimensions keep their frequency, slow ones are interpolated, with a ramp between. Source: Peng et al., arXiv
    2309.00071."""

    def dimension(rotations: float) -> float:
        turns = spec.original_max_position_embeddings / (rotations * 2 * math.pi)
        return spec.rotary_dim * math.log(turns) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    if low == high:
        high += 0.001
    steps = torch.arange(spec.rotary_dim // 2, device=exponents.device, dtype=torch.float32)
    kept = 1 - ((steps - low) / (high - low)).clamp(0, 1)
    periods = spec.theta**exponents
    return (1.0 / (spec.factor * periods)) * (1 - kept) + (1.0 / periods) * kept


def _llama3(spec: RopeSpec, exponents: Tensor) -> Tensor:
    """Long wavelengths are interpolated, short ones kept, smoothly between. Source: Llama 3.1's model.py."""
    frequencies = _default(spec, exponents)
    wavelengths = 2 * math.pi / frequencies
    context = spec.original_max_position_embeddings
    smooth = (context / wavelengths - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    between = (1 - smooth) * frequencies / spec.factor + smooth * frequencies
    is_long = wavelengths > context / spec.low_freq_factor
    is_short = wavelengths < context / spec.high_freq_factor
    return torch.where(is_long, frequencies / spec.factor, torch.where(is_short, frequencies, between))


_FORMULAS = {
    "default": _default,
    "linear": _linear,
    "dynamic": _default,  # up to max_position_embeddings
    "proportional": _proportional,
    "longrope": _longrope,  # up to original_max_position_embeddings
    "yarn": _yarn,
    "llama3": _llama3,
}
