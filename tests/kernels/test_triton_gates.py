"""The gates of the GPU kernels, which need no GPU: what the compiled code is made of, and that nothing is compiled anew
within a job."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from batchinfer.kernels.common import triton_inspect
from batchinfer.kernels.common.triton_ahead import ahead_of_time
from batchinfer.kernels.common.triton_inspect import Anatomy
from batchinfer.kernels.common.triton_targets import TARGETS
from batchinfer.kernels.gated_activation import gpu as gated_gpu
from batchinfer.kernels.paged_attention import gpu as attention_gpu
from batchinfer.kernels.paged_attention.variant import Variant
from batchinfer.kernels.quantized_linear import gpu as linear_gpu
from batchinfer.kernels.rms_norm import gpu as norm_gpu

from batchinfer.executors import kernel_gates
from batchinfer.executors.kernel_cases import MODELS, KernelCase, ModelShape, _linear, cases
from batchinfer.executors.kernel_gates import Verdict, all_verdicts, table_head, table_row, verdicts

LLAMA = MODELS[0]


def some_cases(monkeypatch, *words):
    chosen = [case for case in cases(LLAMA) if any(word in case.name for word in words)]
    monkeypatch.setattr("batchinfer.executors.kernel_gates.cases", lambda model: chosen)
    return chosen


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_element_wise_kernels_hold_to_the_gates(monkeypatch, target):
    chosen = some_cases(monkeypatch, "add_rms_norm", "gated", "rotary_kv_store fp8")
    found = verdicts(TARGETS[target], LLAMA)
    assert {verdict.case for verdict in found} == {case.name for case in chosen}
    assert [table_row(verdict) for verdict in found if verdict.faults] == []


def test_a_product_of_few_rows_uses_wgmma(monkeypatch):
    some_cases(monkeypatch, "packed_linear int4, 16")
    (verdict,) = verdicts(TARGETS["sm_90"], LLAMA)
    assert verdict.faults == ()
    assert verdict.anatomy.matrix_products["H"] > 0


@pytest.mark.parametrize(("case", "kind"), [("fp8_linear int4, 16", "Q"), ("quantized_linear int8, 16", "I")])
def test_products_of_8_bits_use_wgmma_for_them(monkeypatch, case, kind):
    (chosen,) = some_cases(monkeypatch, case)
    found = verdicts(TARGETS["sm_90"], LLAMA)
    assert [table_row(verdict) for verdict in found if verdict.faults] == []
    assert chosen.matrix_kind == kind
    assert sum(verdict.anatomy.matrix_products[kind] for verdict in found) > 0


def test_products_that_a_target_has_not_are_left_out_and_told_from_others(monkeypatch):
    some_cases(monkeypatch, "fp8_linear int4, 16")
    assert verdicts(TARGETS["sm_80"], LLAMA) == []
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
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_every_kernel_holds_to_the_gates(target, model):
    """Each case of a model has its verdict, and all programs but those that read little load 16 bytes at once."""
    found = verdicts(TARGETS[target], model)
    assert [table_row(verdict) for verdict in found if verdict.faults] == []
    names = [case.name for case in cases(model) if TARGETS[target].has_e4m3 or not case.needs_e4m3]
    assert list(dict.fromkeys(verdict.case for verdict in found)) == names
    narrow = {verdict.anatomy.name for verdict in found if max(verdict.anatomy.load_bits) < 128}
    assert narrow <= {"_join_draws", "_change"}


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_89", "sm_120"])
def test_attention_holds_to_the_gates_where_blocks_share_little_memory(monkeypatch, target):
    some_cases(monkeypatch, "attention, prompt, fp8", "attention, prompt, bf16")
    assert [table_row(verdict) for verdict in verdicts(TARGETS[target], LLAMA) if verdict.faults] == []


def test_the_table_says_which_gates_are_broken(monkeypatch):
    some_cases(monkeypatch, "gated")
    target = TARGETS["sm_90"]
    broken = Anatomy("kernel", 255, 3, target.shared_bytes + 1, {"H": 0}, {32: 4, 8: 1}, 16)
    monkeypatch.setattr("batchinfer.executors.kernel_gates.dissect", lambda *arguments: [broken])
    (verdict,) = verdicts(target, LLAMA)
    faults = ("3 spills", "more shared memory than 227 KiB", "no loads of 16 bytes", "loads of single bytes")
    assert verdict.faults == faults
    assert table_row(verdict).endswith("; ".join(faults))
    assert len(table_head()) > 100


def bad_case(monkeypatch, launch, matrix_kind=""):
    """The verdict on sm_80 of a case whose operation is `launch`."""
    monkeypatch.setattr(norm_gpu, "launch", launch, raising=False)
    case = KernelCase("bad", "rms_norm", "launch", lambda device: (), matrix_kind=matrix_kind)
    monkeypatch.setattr("batchinfer.executors.kernel_gates.cases", lambda model: [case])
    (verdict,) = verdicts(TARGETS["sm_80"], LLAMA)
    return verdict


def test_a_row_too_wide_for_a_warps_registers_spills(monkeypatch):
    n = 32768
    arguments = (*(meta(1, 1, n), meta(n), meta(1, n)), 1, 1, n, n, 1e-5)
    verdict = bad_case(monkeypatch, lambda: norm_gpu._rms_norm[(1,)](*arguments, N=n, ROWS=1, BLOCK=n, num_warps=1))
    assert verdict.anatomy.spills > 0
    assert verdict.faults == (f"{verdict.anatomy.spills} spills",)


@triton.jit
def _copy_apart(x_ptr, out_ptr, SIZE: tl.constexpr):
    """Each second number of x."""
    place = tl.arange(0, SIZE)
    tl.store(out_ptr + place, tl.load(x_ptr + 2 * place))


@triton.jit
def _product(a_ptr, b_ptr, out_ptr, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out_ptr + place, tl.dot(tl.load(a_ptr + place), tl.load(b_ptr + place), input_precision="ieee"))


@pytest.mark.parametrize(("size", "faults"), [(4096, ("no loads of 16 bytes",)), (128, ())])
def test_numbers_that_lie_apart_are_not_loaded_in_vectors_which_matters_where_there_are_many(monkeypatch, size, faults):
    """128 threads: of 4096 numbers each reads 32, of 128 one."""
    x, out = torch.empty(2 * size, device="meta"), torch.empty(size, device="meta")
    verdict = bad_case(monkeypatch, lambda: _copy_apart[(1,)](x, out, SIZE=size, num_warps=4))
    assert verdict.faults == faults
    assert verdict.notes == (() if faults else ("no loads of 16 bytes: a thread reads at most 4 at once",))


def test_bytes_that_are_loaded_one_by_one(monkeypatch):
    x, out = (torch.empty(8192, dtype=torch.uint8, device="meta") for _ in range(2))
    verdict = bad_case(monkeypatch, lambda: _copy_apart[(1,)](x, out, SIZE=4096, num_warps=4))
    assert "loads of single bytes" in verdict.faults


@pytest.mark.parametrize(("dtype", "faults"), [(torch.float32, ("no HMMA",)), (torch.bfloat16, ())])
def test_products_by_other_instructions(monkeypatch, dtype, faults):
    """No matrix instruction takes float32 as it is."""
    a = torch.empty(32, 32, dtype=dtype, device="meta")
    out = torch.empty(32, 32, device="meta")
    verdict = bad_case(monkeypatch, lambda: _product[(1,)](a, a, out, SIZE=32, num_warps=4), matrix_kind="H")
    assert verdict.faults == faults


@pytest.mark.slow
def test_kernels_of_sampling_say_why_they_load_no_vectors(monkeypatch):
    chosen = some_cases(monkeypatch, "sample, changed")
    found = verdicts(TARGETS["sm_90"], LLAMA)
    assert len(chosen) == 1
    assert [table_row(verdict) for verdict in found if verdict.faults] == []
    names = ["find_tops", "pick_highest", "_copy_changed", *["_change"] * 3, "find_tops", "pick_highest", "find_cuts"]
    assert [verdict.anatomy.name for verdict in found] == [*names, "_draw", "_join_draws"]
    assert {verdict.anatomy.name for verdict in found if verdict.notes} == {"_change", "_join_draws"}
    assert table_row(found[3]).endswith("ok; no loads of 16 bytes: a thread reads at most 8 at once")


def test_kernels_are_compiled_once_for_all_models_and_read_once(monkeypatch):
    """Qwen3-8B's layers are as wide as Llama-3.1-8B's."""
    target = TARGETS["sm_80"]
    read = []
    disassembled = triton_inspect._disassembled
    monkeypatch.setattr(
        triton_inspect, "_disassembled", lambda codes, target: disassembled(read.append(len(codes)) or codes, target)
    )
    monkeypatch.setattr(triton_inspect, "_known", {})
    some_cases(monkeypatch, "add_rms_norm", "greedy")
    first, second = (verdicts(target, model) for model in (LLAMA, MODELS[1]))
    assert [verdict.anatomy for verdict in first] == [verdict.anatomy for verdict in second]
    assert read == [3, 0]


def test_each_of_many_binaries_has_its_own_instructions():
    """Read together as read alone, but for where a jump goes to and how many digits a number is shown with."""
    with ahead_of_time(TARGETS["sm_90"]) as launches:
        norm_gpu.add_rms_norm(meta(4, 256), meta(4, 256), meta(256), 1e-5)
        gated_gpu.gated_activation(meta(4, 512), "silu")
    target, cubins = TARGETS["sm_90"], [kernel.asm["cubin"] for kernel in launches.distinct]
    together = [operations(code) for code in triton_inspect._disassembled(cubins, target)]
    assert together == [operations(next(triton_inspect._disassembled([cubin], target))) for cubin in cubins]
    assert together[0][-1] == together[1][-1] == "NOP"
    assert set(together[0]) != set(together[1])


def operations(code):
    """What follows each instruction's offset and condition."""
    return re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([\w.]+)", code, flags=re.MULTILINE)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_command_has_the_verdicts_of_each_target_and_model_in_order(monkeypatch, workers):
    started = []
    monkeypatch.setattr(kernel_gates, "usable_processors", lambda: workers)
    monkeypatch.setattr(kernel_gates, "_of_target", lambda target, models: [(target.name, m.name) for m in models])
    monkeypatch.setattr(
        kernel_gates,
        "ProcessPoolExecutor",
        lambda number, context: started.append(number) or ThreadPoolExecutor(number),
    )
    wanted = [("sm_90", "Llama-3.1-8B"), ("sm_90", "Qwen3-8B"), ("sm_80", "Llama-3.1-8B"), ("sm_80", "Qwen3-8B")]
    assert list(all_verdicts([TARGETS["sm_90"], TARGETS["sm_80"]], MODELS[:2])) == wanted
    assert started == [workers] * (workers > 1)


def test_a_row_of_the_table_shows_what_was_found():
    anatomy = Anatomy("_kernel", 64, 0, 2048, {"H": 16}, {128: 8, 32: 2}, 64)
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
