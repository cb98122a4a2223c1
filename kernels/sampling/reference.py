"""The rules of sampling in plain torch, batched over rows; names, meanings and order of application follow vLLM's:
logit bias, penalties, masked tokens, temperature, min-p, top-k, top-p, then the draw.

Every operation here works row by row (softmax, cumsum, topk, max), so that a row's token does not depend on the batch;
sums over rows, which torch may split over threads by the number of rows, are avoided."""

import torch
from batchinfer.kernels.sampling.noise import gumbel_noise
from torch import Tensor

_BLOCK_ELEMENTS = 2**20  # 4 MiB of float32: rows enough to share among threads
_NOISE_ELEMENTS = 2**18  # the int64 temporaries of the noise, 2 bytes an element each, then stay in a 2 MiB L2 cache
_LARGEST = 1e30  # adjusted logits stay within it, so that dividing by any allowed temperature stays finite
_TOP_P_PREFIX = 1024  # most nuclei are smaller; the others are cut by a full sort


def rows_per_block(vocab_size: int) -> int:
    """Rows that `sample` should be given at once."""
    return max(1, _BLOCK_ELEMENTS // vocab_size)


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See the package's `greedy`."""
    highest, token_ids = logits.max(dim=-1)
    return token_ids, highest.isfinite()


def add_bias(logits: Tensor, rows: Tensor, token_ids: Tensor, bias: Tensor) -> None:
    """In place: logits[rows[i], token_ids[i]] += bias[i]. (row, token) pairs are unique; bias float32 [k]."""
    _update(logits, rows, token_ids, logits[rows, token_ids] + bias)


def apply_penalties(
    logits: Tensor,
    rows: Tensor,
    token_ids: Tensor,
    output_counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """In place, for unique (row, token) pairs: every token of a row's prompt or output.

    rows, token_ids int64 [k]; output_counts float32 [k], how often the token stands in the output (0: in the prompt
    only); the penalties float32 [k]. Repetition divides positive logits and multiplies the others; frequency and
    presence are subtracted for output tokens.
    """
    values = logits[rows, token_ids]
    repetition = repetition.clamp(1 / _LARGEST, _LARGEST)
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * output_counts + presence * (output_counts > 0)
    _update(logits, rows, token_ids, values)


def _update(logits: Tensor, rows: Tensor, token_ids: Tensor, values: Tensor) -> None:
    logits[rows, token_ids] = values.clamp(-_LARGEST, _LARGEST)  # NaN stays NaN


def mask_tokens(logits: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    """In place: logits[rows[i], token_ids[i]] = -inf."""
    logits[rows, token_ids] = -torch.inf


def has_filters(min_p: Tensor, top_k: Tensor, top_p: Tensor) -> bool:
    """Whether any row has a filter that is on."""
    return bool((min_p > 0).any() | (top_k > 0).any() | (top_p < 1).any())


def scale_and_filter(logits: Tensor, temperature: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """In place, and returned: (logits - the row's highest) / temperature, -inf for tokens that a filter drops. Float32;
    arguments as `sample`'s. Tokens tied with the last one that a filter keeps are kept too."""
    scaled = logits.sub_(logits.amax(dim=-1, keepdim=True)).div_(temperature[:, None])
    _keep_min_p(scaled, min_p)
    _keep_top_k(scaled, top_k)
    _keep_top_p(scaled, top_p)
    return scaled


def draw(logits: Tensor, temperature: Tensor, noise_keys: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """argmax of (logits - the row's highest) / temperature plus Gumbel noise; arguments as `sample`'s. Returns what
    `greedy` does."""
    highest = logits.amax(dim=-1, keepdim=True).to(torch.float32)
    scaled = (logits - highest).div_(temperature[:, None])
    rows = max(1, _NOISE_ELEMENTS // logits.shape[-1])
    blocks = zip(scaled.split(rows), noise_keys.split(rows), positions.split(rows), strict=True)
    token_ids = [gumbel_noise(*key, logits.shape[-1]).add_(block).argmax(dim=-1) for block, *key in blocks]
    return torch.cat(token_ids), highest.squeeze(-1).isfinite()


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
