"""The calls that the checks of the GPU kernels make: each operation at the sizes of known models. Used by kernel_gates
and kernel_device."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from batchinfer.errors import UsageError
from batchinfer.kernels.common.key_offset import SEGMENT
from batchinfer.kernels.paged_attention.segments import SEGMENT_KEYS, stack_size

BLOCK_SIZE = 16
CHUNK = 1024  # tokens of a prompt in one step
NUM_SEQS = 64  # that decode beside each other
CONTEXT = 2048  # tokens of each
LIBRARY_ROWS = 512  # from here on all devices have packed_linear's product from the library
# Rows of products by function and weight.
LINEAR_ROWS = {
    ("packed_linear", "int4"): (1, 16, 32, 64, 256, LIBRARY_ROWS, 1024, 4096),
    ("packed_linear", "fp8"): (16, 256, 1024),
    ("fp8_linear", "int4"): (1, 16, 64, 512, 4096),
    ("fp8_linear", "fp8"): (16, 64, 1024),
    ("quantized_linear", "int8"): (1, 16, 64, 512, 4096),
}
CACHES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model's layer."""

    name: str
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int


MODELS = (
    ModelShape("Llama-3.1-8B", 4096, 32, 8, 128, 14336, 128256),
    ModelShape("Qwen3-8B", 4096, 32, 8, 128, 12288, 151936),
    ModelShape("Qwen2.5-0.5B", 896, 14, 2, 64, 4864, 151936),
    ModelShape("SmolLM2-135M", 576, 9, 3, 64, 1536, 49152),
)


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One call of an operation. The backends of `op` take the same arguments, which `arguments` makes on a device:
    "meta" for none."""

    name: str
    op: str  # a package of kernels
    function: str
    arguments: Callable[[str], tuple[Any, ...]]
    moved_bytes: int = 0  # that a device must read and write at least
    flops: int = 0
    matrix_kind: str = ""  # of the products that the gates ask for, as Target.matrix_pattern has it; empty: none
    needs_e4m3: bool = False  # products that not all devices have
    reference: Callable[..., Any] | None = None  # None: the function of the op's own reference
    rows: int = 0  # of a product's activations
    weight: str = ""  # of a product, as LINEAR_ROWS has it


def cases(model: ModelShape) -> Iterator[KernelCase]:
    yield from _elementwise(model)
    for name, dtype in CACHES.items():
        yield _store(model, name, dtype)
        yield _chunk(model, name, dtype)
        yield _decode(model, name, dtype)
        yield _decode_together(model, name, dtype)
    for form, form_rows in LINEAR_ROWS.items():
        for rows in form_rows:
            yield _linear(model, rows, *form)
    yield from sampling_cases(model)


def _values(device: str, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device).to(torch.bfloat16)


def _elementwise(model: ModelShape) -> Iterator[KernelCase]:
    hidden, wide = (CHUNK, model.hidden), (CHUNK, 2 * model.intermediate)
    row_bytes = 2 * CHUNK * model.hidden

    def add_norm(device: str) -> tuple[Any, ...]:
        return (*(_values(device, *hidden) for _ in range(2)), _values(device, model.hidden), 1e-5)

    yield KernelCase("add_rms_norm", "rms_norm", "add_rms_norm", add_norm, 4 * row_bytes)

    def add_layer_norm(device: str) -> tuple[Any, ...]:
        weights = (_values(device, model.hidden) for _ in range(2))
        return (*(_values(device, *hidden) for _ in range(2)), *weights, 1e-5)

    yield KernelCase("add_layer_norm", "layer_norm", "add_layer_norm", add_layer_norm, 4 * row_bytes)

    def head_norm(device: str) -> tuple[Any, ...]:
        heads = _values(device, CHUNK, model.q_heads + 2 * model.kv_heads, model.head_dim)
        return heads[:, : model.q_heads], _values(device, model.head_dim), 1e-6

    head_bytes = 4 * CHUNK * model.q_heads * model.head_dim
    yield KernelCase("rms_norm of heads", "rms_norm", "rms_norm", head_norm, head_bytes)

    def gate(device: str) -> tuple[Any, ...]:
        return _values(device, *wide), "silu"

    yield KernelCase("gated_activation", "gated_activation", "gated_activation", gate, 6 * CHUNK * model.intermediate)


def _store(model: ModelShape, name: str, dtype: torch.dtype) -> KernelCase:
    def arguments(device: str) -> tuple[Any, ...]:
        heads = _values(device, CHUNK, model.q_heads + 2 * model.kv_heads, model.head_dim)
        q, k, v = heads.split([model.q_heads, model.kv_heads, model.kv_heads], dim=1)
        table = torch.randn(CHUNK, model.head_dim, device=device)
        tokens = torch.arange(CHUNK, device=device)
        caches = _cache(model, dtype, CHUNK, device)
        has_scales = dtype.itemsize == 1
        known = (*(_key_offset(model, CHUNK, device) for _ in range(2)), tokens) if has_scales else (None, None, None)
        return q, k, v, tokens, table, *caches[:2], tokens.flip(0), *caches[2:], *known

    heads = 4 * model.q_heads + (2 + dtype.itemsize) * 2 * model.kv_heads
    return KernelCase(
        f"rotary_kv_store {name}", "kv_store", "rotary_kv_store", arguments, CHUNK * model.head_dim * heads
    )


def _cache(model: ModelShape, dtype: torch.dtype, tokens: int, device: str) -> tuple[Tensor | None, ...]:
    """Keys, values and their scales, for `tokens` tokens."""
    shape = (-(-tokens // BLOCK_SIZE), model.kv_heads, BLOCK_SIZE, model.head_dim)
    keys, values = (torch.randn(shape, device=device).mul_(20).to(dtype) for _ in range(2))
    if dtype.itemsize > 1:
        return keys, values, None, None
    return keys, values, *(torch.rand(shape[:-1], device=device) * 0.05 for _ in range(2))


def _key_offset(model: ModelShape, positions: int, device: str) -> Tensor:
    return torch.randn(-(-positions // SEGMENT), model.kv_heads, model.head_dim, device=device)


def _attention(
    model: ModelShape, dtype: torch.dtype, q_lens: list[int], contexts: list[int]
) -> Callable[[str], tuple[Any, ...]]:
    def arguments(device: str) -> tuple[Any, ...]:
        from batchinfer.kernels.paged_attention.variant import Variant

        keys, values, *scales = _cache(model, dtype, sum(contexts), device)
        width = -(-max(contexts) // BLOCK_SIZE)
        table = torch.arange(len(contexts) * width, device=device).view(-1, width).int()
        offsets = torch.tensor([0, *q_lens], device=device).cumsum(0).int()
        lengths = torch.tensor(contexts, device=device).int()
        q = _values(device, sum(q_lens), model.q_heads, model.head_dim)
        k_offset = _key_offset(model, width * BLOCK_SIZE, device) if dtype.itemsize == 1 else None
        return q, keys, values, table, offsets, lengths, *scales, Variant(model.head_dim**-0.5, k_offset=k_offset)

    return arguments


def _chunk(model: ModelShape, name: str, dtype: torch.dtype) -> KernelCase:
    """A whole prompt of two chunks' length: each query sees half of it on average."""
    length = 2 * CHUNK
    products = 4 * model.q_heads * model.head_dim * length * (length + 1) // 2
    arguments = _attention(model, dtype, [length], [length])
    return KernelCase(f"attention, prompt, {name}", "paged_attention", "paged_attention", arguments, 0, products, "H")


def _decode(model: ModelShape, name: str, dtype: torch.dtype) -> KernelCase:
    arguments = _attention(model, dtype, [1] * NUM_SEQS, [CONTEXT] * NUM_SEQS)
    vector = model.head_dim * dtype.itemsize + (4 if dtype.itemsize == 1 else 0)
    moved = NUM_SEQS * CONTEXT * model.kv_heads * 2 * vector
    return KernelCase(f"attention, new tokens, {name}", "paged_attention", "paged_attention", arguments, moved)


def _decode_together(model: ModelShape, name: str, dtype: torch.dtype) -> KernelCase:
    """Half of each context is the same for all, and read by as many sequences at once as fit a tile."""
    alone, size, segments = _decode(model, name, dtype), stack_size(model.q_heads // model.kv_heads), 2

    def arguments(device: str) -> tuple[Any, ...]:
        q, keys, values, table, *rest = alone.arguments(device)
        shared = segments * SEGMENT_KEYS // BLOCK_SIZE
        table[:, :shared] = table[:1, :shared].clone()
        members = torch.arange(-(-NUM_SEQS // size) * size, device=device).view(-1, size).repeat_interleave(size, 0)
        members = torch.where(members < NUM_SEQS, members, -1)[:NUM_SEQS]
        stacks = torch.cat((torch.full_like(members[:, :1], segments), members), 1).int()
        return q, keys, values, table, *rest, stacks

    own = 1 - segments * SEGMENT_KEYS / CONTEXT  # of a sequence's keys
    moved = int(alone.moved_bytes * (own + (1 - own) / NUM_SEQS))
    name = f"attention, shared keys, {name}"
    return KernelCase(name, alone.op, alone.function, arguments, moved, reference=_attention_apart)


def _attention_apart(*arguments: Any) -> Tensor:
    from batchinfer.kernels.paged_attention import reference

    return reference.paged_attention(*arguments[:-1])


def _linear(model: ModelShape, rows: int, function: str, name: str) -> KernelCase:
    """The product behind the MLP's gate. W4: groups of 128 with zeros; fp8: a scale a channel."""
    n, k, group = 2 * model.intermediate, model.hidden, 128 if name == "int4" and model.hidden % 128 == 0 else None
    kinds = {"packed_linear": "H", "fp8_linear": "Q", "quantized_linear": "I"}
    by_library = function == "packed_linear" and rows >= LIBRARY_ROWS

    def arguments(device: str) -> tuple[Any, ...]:
        x = _values(device, rows, k)
        weight = _int8_weight(n, k, device) if name == "int8" else _weight(name, n, k, group or k, device)
        return x, weight, None, torch.empty(rows, n, dtype=x.dtype, device=device)

    bytes_of_weight = n * k // (2 if name == "int4" else 1)
    return KernelCase(
        f"{function} {name}, {rows}",
        *("quantized_linear", function, arguments),
        moved_bytes=bytes_of_weight if rows <= 64 else 0,
        flops=0 if rows <= 64 else 2 * rows * n * k,
        matrix_kind="" if by_library else kinds[function],
        needs_e4m3=function == "fp8_linear",
        reference=_dequantized_linear if function == "packed_linear" else None,
        rows=rows,
        weight=name,
    )


def _weight(name: str, n: int, k: int, group: int, device: str) -> Any:
    from batchinfer.kernels.quantized_linear.gpu_weight import RUNS, GpuWeight
    from batchinfer.kernels.quantized_linear.packed import Kind

    run = next(run for run in RUNS if group % run == 0)
    filled = -(-k // (2 * run)) * 2 * run
    kind, width = (Kind.INT4, filled // 2) if name == "int4" else (Kind.E4M3, filled)
    values = torch.randint(0, 256 if name == "int4" else 0x7F, (n, width), dtype=torch.uint8, device=device)
    scales = torch.rand(-(-k // group), n, device=device) * 0.01
    zeros = torch.full_like(scales, 8.0) if name == "int4" else None
    return GpuWeight(kind, values, scales, zeros, None, run, group // run, None, n, k)


def _int8_weight(n: int, k: int, device: str) -> Any:
    from batchinfer.kernels.quantized_linear.gpu_weight import Int8GpuWeight
    from batchinfer.kernels.quantized_linear.weight import GROUP

    groups = -(-k // GROUP)
    values = torch.randint(-127, 128, (n, groups * GROUP), dtype=torch.int8, device=device)
    return Int8GpuWeight(values, torch.rand(groups, n, device=device) * 0.01, n, k)


def _dequantized_linear(x: Tensor, weight: Any, bias: Tensor | None, out: Tensor) -> None:
    out.copy_(torch.nn.functional.linear(x, weight.dequantize(x.dtype), bias))


def sampling_cases(model: ModelShape) -> Iterator[KernelCase]:
    """Tokens for the rows of a decode step, from float32 logits."""
    read = 4 * NUM_SEQS * model.vocab
    yield KernelCase("greedy", "sampling", "greedy", lambda device: (_logits(model, device),), read)
    for name, filters in {"plain": (0, 1.0), "top-k, top-p": (50, 0.95), "top-p": (0, 0.95)}.items():
        yield KernelCase(f"sample, {name}", "sampling", "sample", _draws(model, *filters), read)
    yield KernelCase("sample, changed", "sampling", "sample", _draws(model, 50, 0.95, has_changes=True), read)


def _logits(model: ModelShape, device: str) -> Tensor:
    return torch.randn(NUM_SEQS, model.vocab, device=device) * 3


def _draws(model: ModelShape, top_k: int, top_p: float, has_changes: bool = False) -> Callable[[str], tuple[Any, ...]]:
    def arguments(device: str) -> tuple[Any, ...]:
        ones, rows = torch.ones(NUM_SEQS, device=device), torch.arange(NUM_SEQS, device=device)
        filters = (ones * 0, torch.full_like(rows, top_k), ones * top_p)
        changes = _changes(model, device) if has_changes else None
        return _logits(model, device), ones * 0.8, *filters, rows * 977, rows + CONTEXT, changes

    return arguments


def _changes(model: ModelShape, device: str) -> Any:
    """Each row has 300 tokens biased, penalised and barred."""
    from batchinfer.kernels.sampling import Bias, LogitChanges, Penalties, RowTokens

    each = 300
    offsets = torch.arange(NUM_SEQS + 1, device=device) * each
    token_ids = torch.arange(NUM_SEQS * each, device=device) % (model.vocab // 2)
    tokens, ones = RowTokens(offsets, token_ids), torch.ones(NUM_SEQS, device=device)
    values = torch.ones(NUM_SEQS * each, device=device)
    penalties = Penalties(tokens, values, ones * 1.1, ones * 0.1, ones * 0.1)
    return LogitChanges(Bias(tokens, values), penalties, RowTokens(offsets, token_ids + model.vocab // 2))


def models(names: Sequence[str]) -> list[ModelShape]:
    """All without a name. Raises UsageError on a name that is not in the table."""
    known = {model.name: model for model in MODELS}
    for name in names:
        if name not in known:
            raise UsageError(f"--model {name}: must be of {', '.join(known)}")
    return [known[name] for name in names] or list(MODELS)
