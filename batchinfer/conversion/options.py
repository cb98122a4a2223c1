"""What `batchinfer quantize` is asked for, checked as a whole; and what a model's shapes allow of it. Free of torch."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from batchinfer.errors import UsageError

METHODS = ("awq", "gptq", "awq-gptq", "rtn", "fp8")
FORMATS = ("awq", "gptq", "compressed-tensors")
DEFAULT_FORMATS = {
    "awq": "awq",
    "gptq": "gptq",
    "awq-gptq": "awq",
    "rtn": "compressed-tensors",
    "fp8": "compressed-tensors",
}
_FORMAT_BITS = {"awq": (4,), "gptq": (2, 3, 4, 8), "compressed-tensors": (4, 8)}
_WORD_BITS = 32
_OF_TEXT = ("calibration", "calibration_column", "calibration_samples", "calibration_length", "seed")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeOptions:
    """bits, symmetric and format None: the method's and the format's own, see `resolved`. Lengths are in tokens.

    Raises UsageError naming the options that no format can write together, and those that work.
    """

    method: str = "awq"
    bits: int | None = None
    group_size: int = 128
    symmetric: bool | None = None
    format: str | None = None
    act_order: bool = False
    damp: float = 0.01
    calibration: str | None = None
    calibration_column: str | None = None
    calibration_samples: int = 128
    calibration_length: int = 512
    search_tokens: int = 4096
    kv_cache_scales: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        _require(self.method in METHODS, f"--method {self.method}: choose one of {', '.join(METHODS)}")
        _require(self.format in (None, *FORMATS), f"--format {self.format}: choose one of {', '.join(FORMATS)}")
        _require(self.group_size == -1 or self.group_size >= 8, f"--group-size {self.group_size}: 8 or more, or -1")
        _require(0 < self.damp < 1, f"--damp {self.damp:g}: a share between 0 and 1, such as 0.01")
        if self.method == "fp8":
            self._check_fp8()
        else:
            self._check_integers()
        _require(
            not self.act_order or self.uses_gptq,
            f"--act-order: only --method gptq and awq-gptq know it, not {self.method}",
        )
        _require(
            not (self.act_order and self.group_size == -1),
            "--act-order --group-size -1: one group a row has no order; drop --act-order",
        )
        _require(
            not self.kv_cache_scales or self.written_format == "compressed-tensors",
            f"--kv-cache-scales: {self.written_format} files have no place for them; add --format compressed-tensors",
        )

    @property
    def written_format(self) -> str:
        return self.format or DEFAULT_FORMATS[self.method]

    @property
    def written_bits(self) -> int:
        return self.bits or (8 if self.method == "fp8" else 4)

    @property
    def is_symmetric(self) -> bool:
        """GPTQ files are symmetric by default, as vLLM reads no others."""
        return self.written_format == "gptq" if self.symmetric is None else self.symmetric

    @property
    def uses_gptq(self) -> bool:
        return self.method in ("gptq", "awq-gptq")

    @property
    def uses_awq(self) -> bool:
        return self.method in ("awq", "awq-gptq")

    @property
    def needs_calibration(self) -> bool:
        return self.uses_awq or self.uses_gptq or self.kv_cache_scales

    def _check_fp8(self) -> None:
        _require(self.bits in (None, 8), f"--method fp8 --bits {self.bits}: fp8 has 8 bits; leave --bits out")
        _require(self.symmetric is not False, "--method fp8 --no-symmetric: fp8 has no zero points; leave it out")
        _require(
            self.written_format == "compressed-tensors",
            f"--method fp8 --format {self.format}: that format has no fp8; choose --format compressed-tensors",
        )

    def _check_integers(self) -> None:
        written, bits = self.written_format, self.written_bits
        allowed = _FORMAT_BITS[written]
        others = [name for name, counts in _FORMAT_BITS.items() if bits in counts]
        _require(
            bits in allowed,
            f"--format {written} --bits {bits}: it holds {', '.join(map(str, allowed))} bits; "
            + (f"--format {' or '.join(others)} holds {bits}" if others else "no format holds that many"),
        )
        _require(
            not (written == "awq" and self.is_symmetric),
            "--format awq --symmetric: AWQ's gemm files have zero points; drop --symmetric, or choose --format gptq or "
            "compressed-tensors",
        )
        _require(
            written == "gptq" or not self.act_order,
            f"--format {written} --act-order: such files keep groups in the order of the inputs; drop --act-order, or "
            "choose --format gptq",
        )

    def check_shapes(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        """shapes: [outputs, inputs] of a layer's linear modules. Raises UsageError naming the module whose width no
        group or word divides, and what divides all."""
        if self.method == "fp8":
            return
        bits, written = self.written_bits, self.written_format
        for module, (num_outputs, num_inputs) in shapes.items():
            if self.group_size != -1 and num_inputs % self.group_size:
                raise UsageError(
                    f"--group-size {self.group_size} does not divide the {num_inputs} inputs of {module}; "
                    f"{_group_sizes(shapes)}"
                )
            if written == "gptq" and num_inputs * bits % _WORD_BITS:
                raise UsageError(f"--format gptq: the {num_inputs} inputs of {module} fill no whole words of 32 bits")
            if written in ("awq", "gptq") and num_outputs * bits % _WORD_BITS:
                raise UsageError(
                    f"--format {written}: the {num_outputs} outputs of {module} fill no whole words of 32 bits; "
                    "choose --format compressed-tensors"
                )

    @property
    def without_effect(self) -> dict[str, str]:
        """Fields that nothing depends on, and why."""
        found = {}
        if not self.uses_gptq:
            found["damp"] = "only --method gptq and awq-gptq add it to moments"
        if not self.uses_awq:
            found["search_tokens"] = "only --method awq and awq-gptq try scales"
        if self.method == "fp8":
            found["group_size"] = "fp8 has a scale a channel"
        if not self.needs_calibration:
            reads_none = f"--method {self.method} reads no text, but for --kv-cache-scales"
            found |= dict.fromkeys(_OF_TEXT, reads_none)
        elif self.calibration is None:
            found["calibration_column"] = "there is no --calibration file"
        return found

    def record(self) -> dict[str, Any]:
        """What the output depends on beside model and texts."""
        # Of the texts the tokens count, not where they came from.
        left_out = {"calibration", "calibration_column", *self.without_effect}
        resolved = {"bits": self.written_bits, "format": self.written_format, "symmetric": self.is_symmetric}
        return {name: value for name, value in {**asdict(self), **resolved}.items() if name not in left_out}


def stated_options(**stated: Any) -> QuantizeOptions:
    """The options of which a person stated some; None is not stated. Raises UsageError as QuantizeOptions does, and
    where one has no effect beside the others: it would promise something about the output that does not hold."""
    given = {name: value for name, value in stated.items() if value is not None}
    options = QuantizeOptions(**given)
    idle = options.without_effect
    if found := next((name for name in given if name in idle), None):
        raise UsageError(f"--{found.replace('_', '-')}: it has no effect here, as {idle[found]}; leave it out")
    return options


def _group_sizes(shapes: Mapping[str, tuple[int, int]]) -> str:
    common = math.gcd(*(num_inputs for _, num_inputs in shapes.values()))
    divisors = [size for size in range(8, common + 1) if common % size == 0]
    usual = [size for size in divisors if size % 32 == 0] or divisors
    return f"{', '.join(map(str, usual))} and -1 (one group a row) do" if usual else "-1 (one group a row) does"


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise UsageError(problem)
