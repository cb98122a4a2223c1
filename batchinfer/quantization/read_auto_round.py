"""AutoRound's own checkpoints: its config is translated to that of GPTQ or AWQ, in whose layouts it packs. Chosen by
config.parse.

Config: vLLM, model_executor/layers/quantization/auto_round.py.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from batchinfer.quantization.fields import QuantizationFields
from batchinfer.quantization.read_awq import parse_awq
from batchinfer.quantization.read_gptq import parse_gptq
from batchinfer.quantization.scheme import QuantizationScheme

_GPTQ, _AWQ = "auto_round:auto_gptq", "auto_round:auto_awq"
_FLOAT_BITS = 16  # and above: the layer is stored as floats


def parse_auto_round(fields: QuantizationFields) -> QuantizationScheme:
    """fields: of a quantization_config with quant_method auto-round. Layers with settings of their own are listed in
    extra_config by their full names."""
    packing = fields.choice(fields.text("packing_format", default=_GPTQ).lower(), "packing_format", (_GPTQ, _AWQ))
    fields.choice(fields.text("data_type", default="int"), "data_type", ("int",))
    common = {name: fields.raw(name) for name in ("bits", "group_size")}
    own = list(_own_settings(fields))
    if packing == _AWQ:
        for name, settings in own:
            if settings["bits"] < _FLOAT_BITS:
                raise fields.error(f"extra_config.{name}", settings, "is not read: AWQ layers are all alike")
        return parse_awq(
            QuantizationFields({**common, "modules_to_not_convert": [name for name, _ in own]}, fields.where)
        )
    return parse_gptq(QuantizationFields({**common, "dynamic": dict(_rule(*entry) for entry in own)}, fields.where))


def _own_settings(fields: QuantizationFields) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Layers that differ from the others, with their bits and, where it is stated, their group_size."""
    for name, value in fields.mapping("extra_config").items():
        if not isinstance(value, Mapping):
            raise fields.error(f"extra_config.{name}", value, "must be an object")
        own = QuantizationFields(value, f"{fields.where}.extra_config.{name}")
        settings = {"bits": own.integer("bits", default=fields.integer("bits"))}
        if own.raw("group_size") is not None:
            settings["group_size"] = own.integer("group_size")
        if any(setting != fields.raw(key) for key, setting in settings.items()):
            yield name, settings


def _rule(name: str, settings: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The entry of GPTQ's `dynamic`."""
    sign, own = ("-:", {}) if settings["bits"] >= _FLOAT_BITS else ("+:", settings)
    return f"{sign}{re.escape(name)}$", own
