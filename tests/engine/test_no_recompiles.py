"""Whatever the steps of a run look like, the kernels that they launch on a GPU were compiled by the warm-up before.
Needs no GPU: tensors have no data, and Triton's driver is replaced."""

import random
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from batchinfer.kernels import sampling
from batchinfer.kernels.common.triton_ahead import variants
from batchinfer.kernels.common.triton_targets import TARGETS
from batchinfer.kernels.quantized_linear import Fp8Weight, IntegerWeight, fp8
from batchinfer.kernels.sampling import LogitChanges, RowTokens

from batchinfer.cache.paged_kv import PagedKVCache
from batchinfer.engine.input_builder import ForwardBatch, WantedTokens
from batchinfer.engine.key_stacks import KeyStacks
from batchinfer.engine.warm_up import warm_up
from batchinfer.models.dummy import DummyCheckpoint
from batchinfer.models.families.registry import parse_config
from batchinfer.models.key_offsets import KeyStatistics
from batchinfer.models.weights import build_decoder
from batchinfer.quantization.config import parse

META = torch.device("meta")
MAX_TOKENS, MAX_SEQS, BLOCK_SIZE, MOST_BLOCKS = 4096, 300, 16, 512
CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": MOST_BLOCKS * BLOCK_SIZE,
}
STACKS = KeyStacks.make(8, 2, BLOCK_SIZE)
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}


@pytest.fixture(autouse=True)
def _meta_counts_as_a_gpu(monkeypatch):
    """So that operations choose their gpu backends."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: tensor.device.type == "meta"))
    for form in (IntegerWeight, Fp8Weight):  # they look at numbers, as the next does
        monkeypatch.setattr(form, "__post_init__", lambda weight: None)
    monkeypatch.setattr(fp8, "centred", lambda weight: weight)


class MetaCheckpoint(DummyCheckpoint):
    def read(self, name):
        kind = name.rpartition(".")[2]
        dtype = {"qweight": torch.int32, "qzeros": torch.int32, "scales": torch.float16}.get(kind, torch.bfloat16)
        return torch.empty(self._shapes[name], dtype=dtype, device=META)


def meta(*shape, dtype=torch.int64):
    return torch.empty(*shape, dtype=dtype, device=META)


def make_model(kv_dtype, quantized, activations="auto"):
    spec = parse_config(CONFIG, "config.json")
    scheme = parse(AWQ, "config.json") if quantized else None
    source = MetaCheckpoint(spec, scheme, META)
    decoder = build_decoder(spec, source, torch.bfloat16, META, activations, scheme=scheme)
    cache = PagedKVCache(decoder.kv_cache_spec(BLOCK_SIZE, kv_dtype), 10_000, "meta")
    if cache.spec.per_token_scales:
        known = KeyStatistics(*(meta(2, 64, dtype=torch.float32) for _ in range(3)))
        decoder.take_off_keys([known] * 2)
    return decoder, cache


def random_step(rng):
    """Numbers of tokens of the step's sequences: single ones, chunks of prompts, or both."""
    num_seqs = rng.choice([1, 2, 8, 15, 16, 17, 64, 65, MAX_SEQS, rng.randint(1, MAX_SEQS)])
    kind = rng.choice(["decode", "chunk", "mixed"])
    lengths = [1] * (num_seqs if kind == "decode" else num_seqs // 2 if kind == "mixed" else 0)
    room = MAX_TOKENS - len(lengths)
    while kind != "decode" and room > 0 and (len(lengths) < num_seqs):
        lengths.append(min(room, rng.choice([1, 2, 16, 31, 128, 1000, rng.randint(1, 2000)])))
        room -= lengths[-1]
    return lengths


def random_changes(rng, n):
    def tokens():
        count = rng.choice([1, 5, 16, 300])
        return RowTokens(meta(n + 1), meta(count)), meta(count, dtype=torch.float32)

    def floats():
        return meta(n, dtype=torch.float32)

    bias, penalties, barred = (tokens() if rng.random() < 0.5 else None for _ in range(3))
    if not (bias or penalties or barred):
        return None
    return LogitChanges(
        bias and sampling.Bias(*bias),
        penalties and sampling.Penalties(*penalties, floats(), floats(), floats()),
        barred and barred[0],
    )


def random_wanted(rng, lengths, width):
    """The last tokens of the sequences, but perhaps for one whose prompt goes on, or all tokens of a scored prompt."""
    counts = [1] * (len(lengths) - rng.randint(0, 1))
    if counts and rng.random() < 0.2:
        counts[0] = lengths[0]
    if sum(counts) == sum(lengths):
        return None
    num_seqs, ints = len(counts), {"dtype": torch.int32}
    return WantedTokens(
        tokens=meta(sum(counts)),
        block_table=meta(num_seqs, width, **ints),
        cu_seqlens_q=meta(num_seqs + 1, **ints),
        seq_lens=meta(num_seqs, **ints),
        stacks=meta(num_seqs, STACKS.width, **ints),
    )


def run_step(rng, decoder, cache):
    lengths = random_step(rng)
    num_tokens, num_seqs = sum(lengths), len(lengths)
    width = rng.choice([1, 2, 15, 16, 17, MOST_BLOCKS, rng.randint(1, MOST_BLOCKS)])
    ints = {"dtype": torch.int32}
    batch = ForwardBatch(
        token_ids=meta(num_tokens),
        positions=meta(num_tokens),
        slot_mapping=meta(num_tokens),
        block_table=meta(num_seqs, width, **ints),
        cu_seqlens_q=meta(num_seqs + 1, **ints),
        seq_lens=meta(num_seqs, **ints),
        prompt_lens=meta(num_seqs, **ints),
        stacks=meta(num_seqs, STACKS.width, **ints),
        wanted=random_wanted(rng, lengths, width),
    )
    hidden = decoder.forward(batch, cache, batch.prompt_lens)
    n = rng.randint(1, num_seqs)
    logits = decoder.compute_logits(hidden[:n])
    floats = [meta(n, dtype=torch.float32) for _ in range(3)]
    if rng.random() < 0.3:
        sampling.greedy(logits)
    else:
        sampling.sample(logits, *floats[:2], meta(n), floats[2], meta(n), meta(n), random_changes(rng, n))


# What the products of each --activation-dtype launch.
PRODUCTS = {"int8": {"_quantize_rows", "_int8_linear"}, "fp8": {"_quantize_tokens", "_fp8_linear"}}
WITHOUT_E4M3 = [
    ("auto", False, "auto"),
    ("fp8", False, "auto"),
    ("fp8", True, "auto"),
    ("int8", True, "auto"),
    ("auto", False, "int8"),
    ("fp8", True, "int8"),
]


@pytest.mark.parametrize(
    ("target", "kv_dtype", "quantized", "activations"),
    [
        *(("sm_80", *model) for model in WITHOUT_E4M3),
        *(("sm_90", *model) for model in (*WITHOUT_E4M3, ("auto", False, "fp8"), ("fp8", True, "fp8"))),
    ],
)
def test_steps_after_the_warm_up_find_all_kernels_compiled(target, kv_dtype, quantized, activations):
    rng = random.Random(0)
    decoder, cache = make_model(kv_dtype, quantized, activations)
    with variants(TARGETS[target]) as launches:
        warm_up(decoder, cache, MAX_TOKENS, MAX_SEQS, MOST_BLOCKS, most_logits=128, key_stacks=STACKS)
        warm = {id(kernel) for kernel in launches.distinct}
        assert {"_rms_norm", "_rotary_kv_store", "_paged_attention", "find_cuts"} <= {k.name for k in launches.distinct}
        products = {name for name in set().union(*PRODUCTS.values()) if name in {k.name for k in launches.distinct}}
        assert products == PRODUCTS.get(activations, set())
        assert len(warm) < 80  # a finite set, whatever the sizes
        number = len(launches.kernels)
        for _ in range(50):
            run_step(rng, decoder, cache)
    assert len(launches.kernels) > number + 50 * 10
    assert [kernel.name for kernel in launches.distinct if id(kernel) not in warm] == []


def test_a_kernel_that_the_warm_up_leaves_out_is_found():
    decoder, cache = make_model("auto", quantized=False)
    with variants(TARGETS["sm_90"]) as launches:
        run_step(random.Random(0), decoder, cache)
        before = len(launches.distinct)
        sampling.greedy(meta(3, 77, dtype=torch.float32))
    assert [kernel.name for kernel in launches.distinct[before:]] == ["find_tops", "pick_highest"]


def test_no_kernel_tunes_itself():
    kernels = Path(sampling.__file__).parent.parent
    assert [path for path in kernels.rglob("*.py") if "autotune" in path.read_text(encoding="utf-8")] == []
