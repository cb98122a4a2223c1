"""Greedy continuations of prompts by an engine, for comparing where two models part. Called by evaluate.py."""

from collections.abc import Sequence
from dataclasses import replace

from batchinfer.config import JobConfig
from batchinfer.errors import BatchInferError, UsageError
from batchinfer.evaluation.windows import TokenIds
from batchinfer.executors.local import LoadedModel, build_engine
from batchinfer.request import Request, RequestId, SamplingParams

PROMPT_TOKENS = 64  # at most: the beginning of a window


def check_positions(model: LoadedModel, num_tokens: int) -> None:
    """Raises UsageError where the model has no positions for greedy_answers of num_tokens."""
    positions = model.decoder.spec.max_position_embeddings
    if PROMPT_TOKENS + num_tokens > positions:
        raise UsageError(
            f"--greedy-tokens {num_tokens}: with prompts of {PROMPT_TOKENS} tokens the model has positions for "
            f"{max(positions - PROMPT_TOKENS, 0)}"
        )


def greedy_answers(
    config: JobConfig, model: LoadedModel, windows: Sequence[TokenIds], num_tokens: int
) -> dict[RequestId, Sequence[int]]:
    """num_tokens token ids, EOS ignored, after the first PROMPT_TOKENS of each window, by the window's number. Of a
    model that passes check_positions. Raises BatchInferError where its numbers are not finite."""
    config = replace(
        config,
        model=replace(config.model, max_model_len=PROMPT_TOKENS + num_tokens),
        scheduler=replace(config.scheduler, max_num_seqs=len(windows)),
    )
    engine = build_engine(config, model, lambda line: None).engine
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    for row, window in enumerate(windows):
        engine.add(Request(RequestId(0, row), window[:PROMPT_TOKENS], params, num_tokens, 0))
    answers: dict[RequestId, Sequence[int]] = {}
    while engine.has_unfinished:
        for result in engine.step():
            if result.token_ids is None:
                raise BatchInferError(f"{model.decoder.spec.family} model: {result.error_message}")
            answers[result.id] = result.token_ids
    return answers
