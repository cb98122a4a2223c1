"""Which reader a checkpoint's quantisation config asks for. Called by models/loader."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from batchinfer.errors import BatchInferError, UsageError
from batchinfer.quantization.fields import QuantizationFields
from batchinfer.quantization.read_auto_round import parse_auto_round
from batchinfer.quantization.read_awq import parse_awq
from batchinfer.quantization.read_compressed_tensors import parse_compressed_tensors
from batchinfer.quantization.read_fp8 import parse_fp8, parse_modelopt
from batchinfer.quantization.read_gguf import parse_gguf
from batchinfer.quantization.read_gptq import parse_gptq
from batchinfer.quantization.scheme import QuantizationScheme

_PARSERS: Mapping[str, Callable[[QuantizationFields], QuantizationScheme]] = {
    "awq": parse_awq,
    "gptq": parse_gptq,
    "compressed-tensors": parse_compressed_tensors,
    "fp8": parse_fp8,
    "fbgemm_fp8": parse_fp8,
    "modelopt": parse_modelopt,
    "gguf": parse_gguf,
    "auto-round": parse_auto_round,
    "intel/auto-round": parse_auto_round,
}


def parse(config: Mapping[str, Any], where: str) -> QuantizationScheme:
    """config: the quantization_config of a config.json, or a file that stands beside it. where: file and field, for
    messages. Raises BatchInferError on a method or setting that is not read."""
    fields = QuantizationFields(config, where)
    method = fields.text("quant_method", default=_guess_method(config)).lower()
    if method not in _PARSERS:
        raise fields.error("quant_method", method, f"is not read; must be one of {', '.join(_PARSERS)}")
    return _PARSERS[method](fields)


def _guess_method(config: Mapping[str, Any]) -> str:
    """The method of configs that do not name it: older files of AutoAWQ and AutoGPTQ, and ModelOpt's own."""
    if "quant_algo" in config or "quantization" in config:
        return "modelopt"
    if "w_bit" in config or "q_group_size" in config or "zero_point" in config:
        return "awq"
    return "gptq" if "desc_act" in config or "sym" in config else ""


def check_wanted(wanted: str, found: QuantizationScheme | None, where: str) -> None:
    """wanted: one of config.QUANTIZATIONS; other than auto it says what the checkpoint must be. Raises UsageError where
    it is not."""
    method = "none" if found is None else found.method
    if wanted not in ("auto", method):
        is_what = "not quantised" if found is None else f"of {method}"
        raise UsageError(
            f"--quantization {wanted}: the checkpoint {where} is {is_what}; leave the option out to run it"
        )


def check_described(names: Collection[str], where: str) -> None:
    """Raises BatchInferError where a checkpoint without a quantisation config has packed tensors."""
    packed = next((n for n in sorted(names) if n.endswith((".qweight", ".weight_packed", ".weight_blocks"))), None)
    if packed is not None:
        raise BatchInferError(f"{where}: {packed} is quantised, but neither config.json nor a file beside it says how")
