"""The options of scheduling, declared as in config.py, of which they are a part: how much runs at once, in which order
it starts, and what it reserves."""

from dataclasses import dataclass

from batchinfer.option_field import option, require, require_choice

ORDERS = ("packed", "input")
ADMISSIONS = ("forecast", "greedy")
BATCHINGS = ("continuous", "static")
KV_ALLOCATIONS = ("paged", "contiguous")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How much runs at once, and what starts when. None of it changes an answer."""

    max_num_batched_tokens: int = option(2048, "Most tokens that one step computes.", metavar="N")
    max_num_seqs: int = option(256, "Most sequences that run at once.", metavar="N")
    order: str = option(
        "packed",
        "In which order rows start: packed brings rows with equal beginnings together and starts those with long "
        "expected answers early; input keeps the order of the input.",
        choices=ORDERS,
    )
    lengths_from: str | None = option(
        None,
        "Expect answers as long as those in this output of an earlier run, row by row; else max_tokens, and what the "
        "rows that have ended show.",
        metavar="OUTPUT",
    )
    admission: str = option(
        "forecast",
        "When a further row starts: forecast, where the cache will hold what all running rows are expected to become; "
        "greedy, wherever its prompt fits, at the price of computing rows again that are pushed out.",
        choices=ADMISSIONS,
    )
    batching: str = option(
        "continuous",
        "continuous lets a row start as soon as another ends; static, for comparison, runs batches of --max-num-seqs "
        "rows in the order of the input, each until its last row has ended.",
        choices=BATCHINGS,
    )
    kv_allocation: str = option(
        "paged",
        "paged takes KV blocks as a row grows; contiguous, for comparison, reserves room for --max-model-len tokens "
        "when a row starts, and shares no prefixes.",
        choices=KV_ALLOCATIONS,
    )

    def __post_init__(self) -> None:
        require(self.max_num_batched_tokens > 0, "max_num_batched_tokens", self.max_num_batched_tokens, "1 or more")
        require(self.max_num_seqs > 0, "max_num_seqs", self.max_num_seqs, "1 or more")
        require_choice("order", self.order, ORDERS)
        require_choice("admission", self.admission, ADMISSIONS)
        require_choice("batching", self.batching, BATCHINGS)
        require_choice("kv_allocation", self.kv_allocation, KV_ALLOCATIONS)

    @property
    def reserves(self) -> bool:
        """Whether a sequence takes all blocks that it could ever need when it starts."""
        return self.kv_allocation == "contiguous"

    @property
    def reorders(self) -> bool:
        """Whether rows may start in another order than the input's. Static batches never do."""
        return self.order == "packed" and self.batching == "continuous"
