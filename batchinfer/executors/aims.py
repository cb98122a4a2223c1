"""What the GPU kernels and whole models are meant to reach, as a share of what the device itself reaches. Used by
kernel_device and model_speed."""

from dataclasses import dataclass

from batchinfer.executors.kernel_cases import LIBRARY_ROWS, KernelCase

COPY, PRODUCT, LIBRARY = "copy", "matrix product", "library's product"
MODEL_SHARE = 0.6  # of the roofline
_ELEMENT_WISE = ("rms_norm", "layer_norm", "gated_activation", "kv_store")
_FEW_ROWS = 16


@dataclass(frozen=True, slots=True)
class Aim:
    """of: COPY, the bytes a second of a large copy; PRODUCT, the operations a second of a large product in bf16;
    LIBRARY, those of the product in bf16 of this very size. share: None where nothing is aimed at."""

    of: str
    share: float | None


def aim_of(case: KernelCase) -> Aim:
    if case.op in _ELEMENT_WISE:
        return Aim(COPY, 0.85)
    if case.op == "paged_attention" and "shared keys" not in case.name:  # which are read more than once
        return Aim(PRODUCT, 0.55) if case.flops else Aim(COPY, 0.8)
    if (case.function, case.weight) == ("packed_linear", "int4"):
        if case.rows >= LIBRARY_ROWS:
            return Aim(LIBRARY, 0.75)
        return Aim(COPY, 0.7) if case.rows <= _FEW_ROWS else _without(case)
    return _without(case)


def _without(case: KernelCase) -> Aim:
    return Aim(PRODUCT if case.flops else COPY, None)


def verdict(share: float, aim: float | None) -> str:
    """Beside a figure: whether it reaches the aim."""
    return "" if aim is None else f", aim {aim:.0%} {'reached' if share >= aim else 'NOT reached'}"
