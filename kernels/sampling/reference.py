"""The rules of sampling in plain torch, batched over rows; names, meanings and order of application follow vLLM's:
logit bias, penalties, masked tokens, temperature, min-p, top-k, top-p, then the draw.

Every operation here works row by row (softmax, cumsum, topk, max), so that a row's token does not depend on the batch;
sums over rows, which torch may split over threads by the number of rows, are avoided."""

import torch
from batchinfer.kernels.sampling.changes import LogitChanges, Penalties, RowTokens
from batchinfer.kernels.sampling.noise import gumbel_noise
from torch import Tensor

_BLOCK_ELEMENTS = 2**20  # 4 MiB of float32: rows enough to share among threads
_NOISE_ELEMENTS = 2**18  # the int64 temporaries of the noise, 2 bytes an element each, then stay in a 2 MiB L2 cache
_LARGEST = 1e30  # changed logits stay within it, so that dividing by any allowed temperature stays finite
_TOP_P_PREFIX = 1024  # most nuclei are smaller; the others are cut by a full sort


def rows_per_block(vocab_size: int) -> int:
    """Rows whose logits may be copied at once."""
    return max(1, _BLOCK_ELEMENTS // vocab_size)


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See the package's `greedy`."""
    highest, token_ids = logits.max(dim=-1)
    return token_ids, highest.isfinite()


def sample(
    logits: Tensor,
    temperature: Tensor,
    min_p: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    noise_keys: Tensor,
    positions: Tensor,
    changes: LogitChanges | None,
) -> tuple[Tensor, Tensor]:
    """See the package's `sample`. Rows are copied a block at a time."""
    token_ids, is_finite = greedy(logits)
    draws = temperature > 0
    for rows in _touched(draws, changes).nonzero().squeeze(-1).split(rows_per_block(logits.shape[-1])):
        chosen = logits[rows].to(torch.float32)
        if changes is not None:
            apply_changes(chosen, rows, changes)
        token_ids[rows], may_choose = greedy(chosen)
        is_finite[rows] &= may_choose
        drawn = draws[rows].nonzero().squeeze(-1)
        columns = (values[rows[drawn]] for values in (temperature, min_p, top_k, top_p))
        scaled = scale_and_filter(chosen[drawn], *columns)
        token_ids[rows[drawn]] = draw(scaled, noise_keys[rows[drawn]], positions[rows[drawn]])
    return token_ids, is_finite


def _touched(draws: Tensor, changes: LogitChanges | None) -> Tensor:
    """bool [n]: rows that are not plainly greedy."""
    if changes is None:
        return draws
    parts = (changes.bias and changes.bias.tokens, changes.penalties and changes.penalties.tokens, changes.barred)
    lengths = [tokens.offsets.diff() for tokens in parts if tokens is not None]
    return torch.stack([draws, *(length > 0 for length in lengths)]).any(dim=0)


def apply_changes(logits: Tensor, rows: Tensor, changes: LogitChanges) -> None:
    """In place. logits: float32 [m, vocab]; rows: int64 [m], their places among the rows of the changes."""
    if bias := changes.bias:
        places, entries = _entries(bias.tokens, rows)
        ids = bias.tokens.token_ids[entries]
        _update(logits, places, ids, logits[places, ids] + bias.values[entries])
    if penalties := changes.penalties:
        _penalise(logits, rows, penalties)
    if barred := changes.barred:
        places, entries = _entries(barred, rows)
        logits[places, barred.token_ids[entries]] = -torch.inf


def _penalise(logits: Tensor, rows: Tensor, penalties: Penalties) -> None:
    places, entries = _entries(penalties.tokens, rows)
    ids, counts = penalties.tokens.token_ids[entries], penalties.output_counts[entries]
    columns = (penalties.repetition, penalties.presence, penalties.frequency)
    repetition, presence, frequency = (values[rows][places] for values in columns)
    repetition = repetition.clamp(1 / _LARGEST, _LARGEST)
    values = logits[places, ids]
    values = torch.where(values > 0, values / repetition, values * repetition)
    _update(logits, places, ids, values - (frequency * counts + presence * (counts > 0)))


def _entries(tokens: RowTokens, rows: Tensor) -> tuple[Tensor, Tensor]:
    """(place among `rows`, place among all entries), both int64 [k], of the entries of these rows."""
    first, lengths = tokens.offsets[rows], tokens.offsets.diff()[rows]
    places = torch.arange(len(rows), device=rows.device).repeat_interleave(lengths)
    before = (lengths.cumsum(0) - lengths)[places]
    return places, first[places] + torch.arange(len(places), device=rows.device) - before


def _update(logits: Tensor, rows: Tensor, token_ids: Tensor, values: Tensor) -> None:
    logits[rows, token_ids] = values.clamp(-_LARGEST, _LARGEST)  # NaN stays NaN


def scale_and_filter(logits: Tensor, temperature: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """In place, and returned: (logits - the row's highest) / temperature, -inf for tokens that a filter drops. Float32;
    arguments as `sample`'s. Tokens tied with the last one that a filter keeps are kept too."""
    scaled = logits.sub_(logits.amax(dim=-1, keepdim=True)).div_(temperature[:, None])
    _keep_min_p(scaled, min_p)
    _keep_top_k(scaled, top_k)
    _keep_top_p(scaled, top_p)
    return scaled


def draw(scaled: Tensor, noise_keys: Tensor, positions: Tensor) -> Tensor:
    """argmax of scaled logits, float32 [n, vocab], plus Gumbel noise: int64 [n]."""
    rows = max(1, _NOISE_ELEMENTS // scaled.shape[-1])
    blocks = zip(scaled.split(rows), noise_keys.split(rows), positions.split(rows), strict=True)
    return torch.cat([gumbel_noise(*key, scaled.shape[-1]).add_(block).argmax(dim=-1) for block, *key in blocks])


def _keep_min_p(scaled: Tensor, min_p: Tensor) -> None:
    """Drops tokens less likely than min_p times the likeliest, whose scaled logit is 0."""
    if bool((min_p > 0).any()):
        _drop_below(scaled, min_p.log()[:, None])


def _keep_top_k(scaled: Tensor, top_k: Tensor) -> None:
    limited = top_k > 0
    if not bool(limited.any()):
        return
    top_k = top_k.clamp(max=scaled.shape[-1])
    values = scaled.topk(int(top_k.max()), dim=-1).values
    cut = values.gather(-1, (top_k - 1).clamp(min=0)[:, None])
    _drop_below(scaled, cut.masked_fill_(~limited[:, None], -torch.inf))


def _keep_top_p(scaled: Tensor, top_p: Tensor) -> None:
    limited = (top_p < 1).nonzero().squeeze(-1)
    if not limited.numel():
        return
    cut = torch.full_like(top_p, -torch.inf)
    cut[limited] = _top_p_cut(scaled[limited], top_p[limited])
    _drop_below(scaled, cut[:, None])


def _top_p_cut(scaled: Tensor, top_p: Tensor) -> Tensor:
    """The smallest logit kept [n]: tokens are kept, likeliest first, until their probabilities sum to top_p."""
    probabilities = scaled.softmax(dim=-1)
    values, ids = scaled.topk(min(_TOP_P_PREFIX, scaled.shape[-1]), dim=-1)
    cut, sums = _cut_sorted(values, probabilities.gather(-1, ids), top_p)
    beyond = (sums < top_p).nonzero().squeeze(-1)
    if beyond.numel() and values.shape[-1] < scaled.shape[-1]:
        values, ids = scaled[beyond].sort(dim=-1, descending=True)
        cut[beyond], _ = _cut_sorted(values, probabilities[beyond].gather(-1, ids), top_p[beyond])
    return cut


def _cut_sorted(values: Tensor, probabilities: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """(smallest value kept, sum of all probabilities), both [n], of rows in falling order."""
    sums = probabilities.cumsum(dim=-1)
    num_kept = (sums - probabilities < top_p[:, None]).sum(dim=-1)
    cut = values.gather(-1, (num_kept - 1).clamp(min=0)[:, None])
    return cut.squeeze(-1), sums[:, -1]


def _drop_below(scaled: Tensor, cut: Tensor) -> None:
    scaled.masked_fill_(scaled < cut, -torch.inf)


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Natural log-probabilities under softmax(logits), in row blocks so that no copy of all logits is made.

    logits float32 [n, vocab], token_ids int64 [n] -> (float32 [n] of the tokens, top ids int64 [n, num_top], likeliest
    first, their log-probabilities float32 [n, num_top]).
    """
    blocks = [
        _token_logprobs_block(block, ids, num_top)
        for block, ids in zip(
            logits.split(rows_per_block(logits.shape[-1])),
            token_ids.split(rows_per_block(logits.shape[-1])),
            strict=True,
        )
    ]
    chosen, top_ids, top = (torch.cat(parts) for parts in zip(*blocks, strict=True))
    return chosen, top_ids, top


def _token_logprobs_block(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    logprobs = logits.log_softmax(dim=-1)
    top, top_ids = logprobs.topk(min(num_top, logits.shape[-1]), dim=-1)
    return logprobs.gather(-1, token_ids[:, None]).squeeze(-1), top_ids, top
