"""AutoRound's own checkpoints: its config is translated to that of GPTQ or AWQ, in whose layouts it packs. Chosen by
config.parse.

Layouts and config: auto-round, export/export_to_autoround/export.py and inference/utils.py.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from batchinfer.quantization.fields import QuantizationFields
from batchinfer.quantization.read_awq import parse_awq
from batchinfer.quantization.read_gptq import parse_gptq
from batchinfer.quantization.scheme import QuantizationScheme

_AWQ, _GPTQ, _GPTQ_V2 = "awq", "gptq", "gptq_v2"
_LAYOUTS = {
    "auto_round:auto_gptq": _GPTQ,
    "auto_round:gptq:exllamav2": _GPTQ,
    "auto_round:gptqmodel": _GPTQ_V2,
    "auto_round:exllamav2": _GPTQ_V2,
    "auto_round": _GPTQ_V2,
    "auto_round:auto_awq": _AWQ,
}
_FLOAT_BITS = 16  # and above: a layer of floats
_OF_PATTERNS = re.compile(r"[*^$|()\[\]?+\\]")


def parse_auto_round(fields: QuantizationFields) -> QuantizationScheme:
    """fields: of a quantization_config with quant_method auto-round."""
    packing = fields.text("packing_format", "backend", default="auto_round:auto_gptq").lower()
    layout = _LAYOUTS[fields.choice(packing, "packing_format", tuple(_LAYOUTS))]
    fields.choice(fields.text("data_type", default="int"), "data_type", ("int",))
    fields.refuse("act_bits", _FLOAT_BITS, 2 * _FLOAT_BITS)
    fields.refuse("rotation_config")
    common = {name: fields.raw(name) for name in ("bits", "group_size")}
    own = list(_own_settings(fields))
    if layout != _AWQ:
        config = {**common, "checkpoint_format": layout, "dynamic": dict(_rules(own))}
        return parse_gptq(QuantizationFields(config, fields.where))
    for name, settings in own:
        if settings["bits"] < _FLOAT_BITS:
            raise fields.error(f"extra_config.{name}", settings, "is not read: layers of AWQ are all alike")
    floats = [name for name, _ in own if not _OF_PATTERNS.search(name)]
    return parse_awq(QuantizationFields({**common, "modules_to_not_convert": floats}, fields.where))


def _own_settings(fields: QuantizationFields) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Layers that differ from the others, by name or pattern, with their bits and, where stated, their group_size."""
    for name, value in fields.mapping("extra_config").items():
        if not isinstance(value, Mapping):
            raise fields.error(f"extra_config.{name}", value, "must be an object")
        own = QuantizationFields(value, f"{fields.where}.extra_config.{name}")
        settings = {"bits": own.integer("bits", default=fields.integer("bits"))}
        if own.raw("group_size") is not None:
            settings["group_size"] = own.integer("group_size")
        if any(setting != fields.raw(key) for key, setting in settings.items()):
            yield name, settings


def _rules(own: list[tuple[str, Mapping[str, Any]]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Entries of GPTQ's `dynamic`: full names before patterns, which may match anywhere in a name."""
    patterns = [(f".*(?:{name})", settings) for name, settings in own if _OF_PATTERNS.search(name)]
    for pattern, settings in [*((f"{re.escape(name)}$", settings) for name, settings in own), *patterns]:
        yield ("-:" + pattern, {}) if settings["bits"] >= _FLOAT_BITS else ("+:" + pattern, settings)
