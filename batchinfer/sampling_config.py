"""The sampling options of a job: defaults for rows that do not carry their own. Part of config.JobConfig."""

import json
from dataclasses import dataclass, fields

from batchinfer.option_field import option, require


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """Parameters of rows that do not carry their own; those not given are the model's (generation_config.json), else
    the defaults below. None is not given."""

    max_tokens: int | None = option(
        None,
        "Most tokens of a completion; 0 only scores the prompt.  [default: the room left]",
        metavar="N",
        affects_answers=True,
        unset="room left",
    )
    min_tokens: int | None = option(
        None, "Fewest tokens of a completion.  [default: 0]", metavar="N", affects_answers=True
    )
    temperature: float | None = option(
        None, "Randomness; 0 always takes the most likely token.  [default: 1]", metavar="X", affects_answers=True
    )
    top_p: float | None = option(
        None,
        "Keep the most likely tokens that make up this share of the probability.  [default: 1]",
        metavar="X",
        affects_answers=True,
    )
    top_k: int | None = option(
        None, "Keep the K most likely tokens; 0 is all.  [default: 0]", metavar="N", affects_answers=True
    )
    min_p: float | None = option(
        None,
        "Drop tokens less likely than this share of the most likely one's probability.  [default: 0]",
        metavar="X",
        affects_answers=True,
    )
    stop: tuple[str, ...] | None = option(
        None, "End the completion before this string. Repeatable.", kind="many", metavar="TEXT", affects_answers=True
    )
    stop_token_ids: tuple[int, ...] | None = option(
        None, "End the completion at this token. Repeatable.", kind="many", metavar="ID", affects_answers=True
    )
    include_stop_str_in_output: bool | None = option(
        None, "Keep the stop string at the end of the completion.  [default: off]", kind="flag", affects_answers=True
    )
    ignore_eos: bool | None = option(
        None, "Do not end at the end-of-sequence tokens.  [default: off]", kind="flag", affects_answers=True
    )
    repetition_penalty: float | None = option(
        None,
        "Divide the logits of tokens seen in prompt or completion (multiply, if negative) by this.  [default: 1]",
        metavar="X",
        affects_answers=True,
    )
    presence_penalty: float | None = option(
        None,
        "Subtract this from the logits of tokens in the completion.  [default: 0]",
        metavar="X",
        affects_answers=True,
    )
    frequency_penalty: float | None = option(
        None,
        "Subtract this for each time the token is in the completion.  [default: 0]",
        metavar="X",
        affects_answers=True,
    )
    logit_bias: str | None = option(
        None,
        'Added to the logits: JSON object of token id to bias, as in {"42": -1.5}.',
        kind="json",
        metavar="JSON",
        affects_answers=True,
    )
    n: int | None = option(None, "Completions of each row.  [default: 1]", metavar="N", affects_answers=True)
    logprobs: int | None = option(
        None,
        "Write the log-probability of each token and of the N most likely in its place.",
        metavar="N",
        affects_answers=True,
    )
    prompt_logprobs: bool | None = option(
        None, "Write the log-probabilities of the prompt's tokens.  [default: off]", kind="flag", affects_answers=True
    )
    seed: int = option(
        0, "Seed of the job; rows may carry their own in a column `seed`.", metavar="N", affects_answers=True
    )

    def __post_init__(self) -> None:
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        given = {name: value for name, value in given.items() if value is not None}
        del given["seed"]  # the job's; a row's own is SamplingParams'
        if "logit_bias" in given:
            given["logit_bias"] = parse_logit_bias(given["logit_bias"])
        if given:
            from batchinfer.request import SamplingParams  # here, as it brings numpy and `--help` needs none

            SamplingParams(**given)


def parse_logit_bias(text: str) -> tuple[tuple[int, float], ...]:
    """(token id, bias) pairs of a JSON object such as {"42": -1.5}. Raises ValueError."""
    allowed = 'a JSON object of token id to number, as in {"42": -1.5}'
    try:
        biases = json.loads(text)
        require(isinstance(biases, dict), "logit_bias", text, allowed)
        return tuple((int(token), float(bias)) for token, bias in biases.items())
    except (ValueError, TypeError):
        raise ValueError(f"logit_bias = {text!r}: must be {allowed}") from None
