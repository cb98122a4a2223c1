"""The gates of the GPU kernels, which need no GPU: what the compiled code is made of, and that nothing is compiled anew
within a job."""

import re
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import triton
from batchinfer.kernels.common import triton_targets
from batchinfer.kernels.common.triton_ahead import ahead_of_time
from batchinfer.kernels.common.triton_inspect import Anatomy, dissect
from batchinfer.kernels.common.triton_targets import TARGETS
from batchinfer.kernels.gated_activation import gpu as gated_gpu
from batchinfer.kernels.paged_attention import gpu as attention_gpu
from batchinfer.kernels.paged_attention.variant import Variant
from batchinfer.kernels.quantized_linear import gpu as linear_gpu
from batchinfer.kernels.rms_norm import gpu as norm_gpu
from triton.backends.compiler import GPUTarget

from batchinfer.executors.kernel_cases import MODELS, ModelShape, _linear, cases
from batchinfer.executors.kernel_gates import Verdict, table_head, table_row, verdicts

LLAMA = MODELS[0]
LARGEST_AND_SMALLEST = (LLAMA, MODELS[-1])  # `bench kernels --compile-only` takes all, and minutes


def some_cases(monkeypatch, *words):
    chosen = [case for case in cases(LLAMA) if any(word in case.name for word in words)]
    monkeypatch.setattr("batchinfer.executors.kernel_gates.cases", lambda model: chosen)
    return chosen


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_element_wise_kernels_hold_to_the_gates(monkeypatch, target):
    chosen = some_cases(monkeypatch, "add_rms_norm", "gated", "rotary_kv_store fp8")
    found = list(verdicts(TARGETS[target], LLAMA))
    assert {verdict.case for verdict in found} == {case.name for case in chosen}
    assert [table_row(verdict) for verdict in found if verdict.faults] == []


def test_a_product_of_few_rows_uses_wgmma(monkeypatch):
    some_cases(monkeypatch, "packed_linear int4, 16")
    (verdict,) = verdicts(TARGETS["sm_90"], LLAMA)
    assert verdict.faults == ()
    assert verdict.anatomy.matrix_products > 0


@pytest.mark.parametrize(("case", "kind"), [("fp8_linear int4, 16", "Q"), ("quantized_linear int8, 16", "I")])
def test_products_of_8_bits_use_wgmma_for_them(monkeypatch, case, kind):
    (chosen,) = some_cases(monkeypatch, case)
    found = list(verdicts(TARGETS["sm_90"], LLAMA))
    assert [table_row(verdict) for verdict in found if verdict.faults] == []
    assert chosen.matrix_kind == kind
    assert sum(verdict.anatomy.matrix_products for verdict in found) > 0


def test_products_that_a_target_has_not_are_left_out_and_told_from_others(monkeypatch):
    some_cases(monkeypatch, "fp8_linear int4, 16")
    assert list(verdicts(TARGETS["sm_80"], LLAMA)) == []
    assert TARGETS["sm_80"].matrix_pattern() == r"\bHMMA\b"
    assert TARGETS["sm_90"].matrix_pattern("Q") == r"\bQGMMA\b"
    assert TARGETS["sm_100"].matrix_pattern("I") == r"\bUTCIMMA\b"
    assert re.search(TARGETS["gfx942"].matrix_pattern("I"), "v_mfma_i32_32x32x16_i8 a[0:15]")
    assert not re.search(TARGETS["gfx942"].matrix_pattern("I"), "v_mfma_f32_32x32x8_bf16_1k a[0:15]")
    assert re.search(TARGETS["gfx942"].matrix_pattern(), "v_mfma_f32_32x32x8_bf16_1k a[0:15]")


def test_weights_are_written_out_for_many_rows(monkeypatch):
    some_cases(monkeypatch, "packed_linear int4, 512")
    (verdict,) = verdicts(TARGETS["sm_90"], LLAMA)
    assert (verdict.anatomy.name, verdict.faults) == ("_dequantize", ())


@pytest.mark.slow
@pytest.mark.parametrize("model", LARGEST_AND_SMALLEST, ids=lambda model: model.name)
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_every_kernel_holds_to_the_gates(target, model):
    assert [table_row(verdict) for verdict in verdicts(TARGETS[target], model) if verdict.faults] == []


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_89", "sm_120"])
def test_attention_holds_to_the_gates_where_blocks_share_little_memory(monkeypatch, target):
    some_cases(monkeypatch, "attention, prompt, fp8", "attention, prompt, bf16")
    assert [table_row(verdict) for verdict in verdicts(TARGETS[target], LLAMA) if verdict.faults] == []


def test_a_kernel_that_breaks_a_gate_is_found(monkeypatch):
    some_cases(monkeypatch, "gated")
    target = TARGETS["sm_90"]
    broken = Anatomy("kernel", 255, 3, target.shared_bytes + 1, 0, {32: 4, 8: 1})
    monkeypatch.setattr("batchinfer.executors.kernel_gates.dissect", lambda *arguments: broken)
    (verdict,) = verdicts(target, LLAMA)
    faults = ("3 spills", "more shared memory than 227 KiB", "no loads of 16 bytes", "loads of single bytes")
    assert verdict.faults == faults
    assert table_row(verdict).endswith("; ".join(faults))
    assert len(table_head()) > 100


@pytest.mark.slow
def test_sampling_holds_to_the_gates_and_says_what_it_is_excused_from(monkeypatch):
    chosen = some_cases(monkeypatch, "sample, changed")
    found = list(verdicts(TARGETS["sm_90"], LLAMA))
    assert len(chosen) == 1
    assert [table_row(verdict) for verdict in found if verdict.faults] == []
    names = ["find_tops", "pick_highest", "_copy_changed", *["_change"] * 3, "find_tops", "pick_highest", "find_cuts"]
    assert [verdict.anatomy.name for verdict in found] == [*names, "_draw", "_join_draws"]
    excused = {verdict.anatomy.name for verdict in found if verdict.excused}
    assert excused == {"pick_highest", "_change", "_join_draws"}
    assert table_row(found[1]).endswith("ok; no loads of 16 bytes: it reads a few numbers a row")


@pytest.mark.parametrize(
    ("arch", "name"),
    [(80, "sm_80"), (87, "sm_86"), (90, "sm_90"), (103, "sm_100"), (120, "sm_120"), (121, "sm_120")],
)
def test_a_device_counts_as_the_newest_kind_below_it(monkeypatch, arch, name):
    """Consumer devices with Blackwell's name have no more memory in a block than those before them."""
    driver = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", arch, 32))
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    assert triton_targets.current().name == name


def test_a_device_older_than_all_is_refused_in_one_line(monkeypatch):
    driver = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 75, 32))
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    with pytest.raises(RuntimeError, match=r"^sm_75: the GPU kernels need sm_80 or newer$"):
        triton_targets.current()


def test_a_row_of_the_table_shows_what_was_found():
    anatomy = Anatomy("_kernel", 64, 0, 2048, 16, {128: 8, 32: 2})
    row = table_row(Verdict("sm_90", "M", "case", anatomy, ()))
    assert row.split() == ["sm_90", "M", "case", "_kernel", "64", "0", "2.0", "16", "128:8", "32:2", "ok"]


def meta(*shape):
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta")


def test_steps_of_other_sizes_compile_nothing_anew():
    """1 and multiples of 16 are what Triton would make kernels of their own for."""
    with ahead_of_time(TARGETS["sm_90"]) as launches:
        for num_tokens in (2, 1, 16, 17, 4096):
            norm_gpu.add_rms_norm(meta(num_tokens, 256), meta(num_tokens, 256), meta(256), 1e-5)
            gated_gpu.gated_activation(meta(num_tokens, 512), "silu")
    assert len(launches.kernels) == 10
    assert len(launches.distinct) == 2


def test_attention_compiles_three_kernels_for_steps_of_any_size():
    cache = meta(100, 2, 16, 64)
    with ahead_of_time(TARGETS["gfx942"]) as launches:
        for q_lens in ([1], [1] * 16, [1, 5], [16] * 16, [300]):
            table, offsets, lengths = (
                torch.empty(shape, dtype=torch.int32, device="meta")
                for shape in ((len(q_lens), 7 + len(q_lens)), (len(q_lens) + 1,), (len(q_lens),))
            )
            q = meta(sum(q_lens), 8, 64)
            attention_gpu.paged_attention(q, cache, cache, table, offsets, lengths, None, None, Variant(0.125))
    assert {kernel.name for kernel in launches.distinct} == {"_paged_attention", "_join_segments"}
    assert len(launches.distinct) == 3  # for chunks, for single tokens, and to join these


def test_offsets_of_keys_bring_three_kernels_more_for_contexts_of_several_segments():
    cache, scale = meta(100, 2, 16, 64).to(torch.float8_e4m3fn), torch.empty(100, 2, 16, device="meta")
    variant = Variant(0.125, k_offset=torch.empty(9, 2, 64, device="meta"))
    with ahead_of_time(TARGETS["gfx942"]) as launches:
        for q_lens, width in (([1], 16), ([1], 17), ([300], 7), ([1] * 16, 33), ([1, 5], 130), ([16] * 16, 97)):
            table, offsets, lengths = (
                torch.empty(shape, dtype=torch.int32, device="meta")
                for shape in ((len(q_lens), width), (len(q_lens) + 1,), (len(q_lens),))
            )
            q = meta(sum(q_lens), 8, 64)
            attention_gpu.paged_attention(q, cache, cache, table, offsets, lengths, scale, scale, variant)
    names = [kernel.name for kernel in launches.distinct]
    assert sorted(names) == ["_join_segments", *["_paged_attention"] * 4, "_score_bias"]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(("function", "name", "kernels"), [
    ("packed_linear", "int4", 5),
    pytest.param("fp8_linear", "fp8", 5, marks=SLOW),
    pytest.param("quantized_linear", "int8", 5, marks=SLOW),
])  # fmt: skip
def test_products_of_all_numbers_of_rows_are_compiled_by_doubling(function, name, kernels):
    """As the engine's warm-up doubles them: tiles of 16, 32, 64 and 128 rows, and what goes before or instead."""
    small = ModelShape("small", 128, 2, 2, 64, 128, 128)
    with ahead_of_time(TARGETS["sm_90"]) as launches:
        for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
            getattr(linear_gpu, function)(*_linear(small, rows, function, name).arguments("meta"))
        warm = set(map(id, launches.distinct))
        assert len(warm) == kernels
        for rows in (3, 15, 17, 33, 63, 65, 100, 129, 349, 350, 511, 513, 4096):
            getattr(linear_gpu, function)(*_linear(small, rows, function, name).arguments("meta"))
        assert set(map(id, launches.distinct)) == warm


def test_dissection_tells_spilling_code():
    """The same kernel with a row far too wide for the registers of one warp."""
    with ahead_of_time(TARGETS["sm_80"]) as launches:
        n = 32768
        norm_gpu._rms_norm[(1,)](
            *(meta(1, 1, n), meta(n), meta(1, n), 1, 1, n, n, 1e-5), N=n, ROWS=1, BLOCK=n, num_warps=1
        )
    assert dissect(launches.kernels[0], TARGETS["sm_80"]).spills > 0
