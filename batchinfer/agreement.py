"""How far two runs of a job agree: the tokens of each answer, and the count of those before the first difference. Used
by the pipeline's benchmark; pure, no torch."""

from collections.abc import Mapping, Sequence

from batchinfer.errors import BatchInferError
from batchinfer.options import EffectiveOptions
from batchinfer.request import RequestId, Result

Answers = Mapping[RequestId, Sequence[int]]


class TokenKeeper:
    """A sink that keeps the tokens of rows without error."""

    def __init__(self) -> None:
        self.tokens: dict[RequestId, Sequence[int]] = {}

    def expect(self, shard: int, row: int, num_samples: int) -> None:
        """Nothing depends on a row's number of samples."""

    def add(self, results: Sequence[Result]) -> None:
        for result in results:
            if result.token_ids is not None:
                self.tokens[result.id] = result.token_ids


def mean_agreement(answers: Answers, reference: Answers) -> float:
    """The mean, over the answers that both have, of the number of tokens before the first difference; where one is the
    beginning of the other, the shorter one's length. Raises BatchInferError where there is no such answer."""
    both = answers.keys() & reference.keys()
    if not both:
        raise BatchInferError("agreement: no row was answered by both models")
    return sum(_equal_tokens(answers[key], reference[key]) for key in both) / len(both)


def reference_options(options: EffectiveOptions, model: str | None, max_model_len: int) -> EffectiveOptions:
    """The job on `model` in float32 throughout, whose tokens equal those of Hugging Face's float32; prompts have as
    much room as they had, and the wider cache takes the memory it needs."""
    precision = {"dtype": "fp32", "activation_dtype": "auto", "kv_cache_dtype": "fp32"}
    precision |= {"kv_cache_dtype_skip_layers": ""}
    if model != options["model"].value:
        precision["quantization"] = "auto"  # the option speaks of the model under test
    sizes = {"max_model_len": max_model_len, "kv_cache_memory": None}
    return options.replaced({"model": model, **precision, **sizes}, "reference run")


def _equal_tokens(tokens: Sequence[int], reference: Sequence[int]) -> int:
    shorter = min(len(tokens), len(reference))
    return next((i for i in range(shorter) if tokens[i] != reference[i]), shorter)
