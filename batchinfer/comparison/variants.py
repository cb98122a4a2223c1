"""What `--vary` asks for: options and their values, their cross product, and the order in which the variants run. Pure;
called by cli/bench_compare.py and compare.py."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass
from typing import Any

from batchinfer.config import iter_options
from batchinfer.errors import UsageError
from batchinfer.options import EffectiveOptions, coerce, did_you_mean, scalar_type

_SWITCH = {"on": True, "off": False}


@dataclass(frozen=True, slots=True)
class Variation:
    """An option and the values that it takes in turn. values: of the option's type. texts: as the user wrote them."""

    option: str
    values: tuple[Any, ...]
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Variant:
    """One run's values of the options that vary. name: as in "kv_cache_dtype=fp8, max_num_seqs=8"."""

    name: str
    values: Mapping[str, Any]


def parse_variations(texts: Sequence[str]) -> tuple[Variation, ...]:
    """One Variation an option, in the order in which the options first come.

    texts: "OPTION=V1,V2", the option with dashes or underscores. Where an option comes in several of them, each gives
    one value, commas included. Raises UsageError naming the text and what is allowed.
    """
    given: dict[str, list[str]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals:
            raise UsageError(f"--vary {text!r}: write OPTION=VALUE,VALUE")
        given.setdefault(_option_name(name), []).append(values)
    return tuple(
        _variation(name, values[0].split(",") if len(values) == 1 else values) for name, values in given.items()
    )


def cross_product(variations: Sequence[Variation]) -> tuple[Variant, ...]:
    """Every combination of their values; the last variation's varies fastest."""
    choices = [[(v.option, *pair) for pair in zip(v.values, v.texts, strict=True)] for v in variations]
    return tuple(
        Variant(
            ", ".join(f"{option}={text}" for option, _, text in chosen), {option: value for option, value, _ in chosen}
        )
        for chosen in itertools.product(*choices)
    )


def with_variant(options: EffectiveOptions, variant: Variant) -> EffectiveOptions:
    """The options with the variant's values. Raises UsageError naming the variant where a rule of the configuration is
    broken."""
    varied = options.replaced(variant.values, "flag")
    try:
        assert varied.config
    except UsageError as error:
        raise UsageError(f"variant {variant.name}: {error}") from error
    return varied


def plan_runs(num_variants: int, rounds: int) -> list[tuple[int, int]]:
    """(round, variant) of each run: every other round runs backwards, as in A B, B A, so that a machine that slows down
    or speeds up steadily favours none."""
    return [
        (number, variant if number % 2 == 0 else num_variants - 1 - variant)
        for number in range(rounds)
        for variant in range(num_variants)
    ]


def _option_name(text: str) -> str:
    """Raises UsageError naming the options that vary."""
    name = text.strip().removeprefix("--").replace("-", "_")
    groups = {member.name: group for group, member in iter_options()}
    allowed = [option for option, group in groups.items() if group != "output"]
    if name in allowed:
        return name
    if name in groups:
        raise UsageError(f"--vary {name}: answers are not written here, so it changes nothing")
    advice = did_you_mean(name, allowed) or f"the options are {', '.join(allowed)}"
    raise UsageError(f"--vary {name}: `run` has no such option; {advice}")


def _variation(name: str, texts: Sequence[str]) -> Variation:
    member = next(member for _, member in iter_options() if member.name == name)
    texts = tuple(text.strip() for text in texts)
    values = tuple(_value(member, text) for text in texts)
    if len(values) < 2:
        raise UsageError(f"--vary {name}={texts[0]}: give two values or more, as in {name}=V1,V2")
    for place, value in enumerate(values):
        if value in values[:place]:
            raise UsageError(f"--vary {name}: {texts[place]} comes twice")
    return Variation(name, values, texts)


def _value(member: "Field[Any]", text: str) -> Any:
    """Raises UsageError naming the option, the text and what is allowed."""
    choices: tuple[str, ...] = member.metadata["choices"]
    if scalar_type(member) is bool:
        choices = tuple(_SWITCH)
    if choices and text not in choices:
        raise UsageError(f"--vary {member.name}: {text!r} is not one of {', '.join(choices)}")
    if scalar_type(member) is bool:
        return _SWITCH[text]
    try:
        return coerce(member, text)
    except ValueError as error:
        raise UsageError(f"--vary {member.name}: {error}") from error
