"""Medians, equal work and the order of runs, on a measure that runs nothing; and the table, against ratios worked out
by hand."""

import pytest
from run_figures import figures

from batchinfer.comparison.compare import compare, medians
from batchinfer.comparison.table import comparison_table
from batchinfer.comparison.variants import cross_product, parse_variations
from batchinfer.errors import BatchInferError, UsageError
from batchinfer.options import EffectiveOptions

BASE = EffectiveOptions.resolve({"input": ("a.jsonl",), "seed": 3})


class Measure:
    """Hands out figures of each value of max_num_seqs in turn; keeps what it was asked for."""

    def __init__(self, outcomes):
        self.outcomes = {size: iter(results) for size, results in outcomes.items()}
        self.asked = []

    def __call__(self, options, report):
        assert options["seed"].value == 3
        size = options["max_num_seqs"].value
        self.asked.append(size)
        result = next(self.outcomes[size])
        if isinstance(result, BaseException):
            raise result
        return result


def run(outcomes, rounds, said=None):
    measure = Measure(outcomes)
    variants = cross_product(parse_variations(["max_num_seqs=" + ",".join(map(str, outcomes))]))
    report = (lambda line: None) if said is None else said.append
    return compare(BASE, variants, rounds, report, measure), measure.asked


def test_variants_come_in_the_order_asked_for_and_figures_are_medians():
    outcomes = {8: [figures(100), figures(300), figures(110)], 4: [figures(50), figures(40), figures(60)]}
    result, asked = run(outcomes, 3)
    assert asked == [8, 4, 4, 8, 8, 4]
    assert [variant["options"] for variant in result["variants"]] == [{"max_num_seqs": 8}, {"max_num_seqs": 4}]
    assert [variant["output_tokens_per_s"] for variant in result["variants"]] == [110, 50]
    assert [run["output_tokens_per_s"] for run in result["variants"][0]["runs"]] == [100, 300, 110]
    assert result["variants"][0]["completion_tokens"] == 60
    assert result["variants"][0]["ttft_ms"]["p99"] == 40.0
    assert result["versions"] == {"batchinfer": "0"}
    assert result["rounds"] == 3
    assert result["same_work"] is True


def test_medians_reach_into_figures_and_leave_what_is_no_number():
    runs = [
        {"a": {"p50": 1.0, "max": 4}, "b": None, "device": "cpu", "n": 7},
        {"a": {"p50": 2.0, "max": 8}, "b": 1.0, "device": "cuda", "n": 7},
    ]
    assert medians(runs) == {"a": {"p50": 1.5, "max": 6}, "b": None, "device": "cpu", "n": 7}
    assert isinstance(medians(runs)["n"], int)


def test_other_work_is_said_with_its_numbers():
    said = []
    result, _ = run({8: [figures()], 4: [figures(completion_tokens=55)]}, 1, said)
    assert result["same_work"] is False
    warnings = [line for line in said if line.startswith("warning: ")]
    assert len(warnings) == 1
    assert "completion tokens: 60 in max_num_seqs=8; 55 in max_num_seqs=4" in warnings[0]
    assert "tokens out" in comparison_table(result)


def test_failed_rows_are_said():
    said = []
    failed = figures(finish_reasons={"stop": 0, "length": 1, "error": 2})
    run({8: [failed], 4: [figures()]}, 1, said)
    assert "warning: 2 rows failed in max_num_seqs=8" in said


@pytest.mark.parametrize("kind", [UsageError, BatchInferError])
def test_a_variant_that_fails_is_named_and_ends_the_comparison(kind):
    with pytest.raises(kind, match=r"^variant max_num_seqs=4: no room$") as caught:
        run({8: [figures()], 4: [kind("no room")]}, 1)
    assert type(caught.value) is kind


def test_no_run_begins_where_a_variant_breaks_a_rule():
    measure = Measure({8: [figures()]})
    variants = cross_product(parse_variations(["max_num_seqs=8,0"]))
    with pytest.raises(UsageError, match="variant max_num_seqs=0"):
        compare(BASE, variants, 1, print, measure)
    assert measure.asked == []


def cells(result):
    return [
        [cell.strip() for cell in line.split("  ") if cell.strip()] for line in comparison_table(result).split("\n")
    ]


def test_the_table():
    slow = {"ttft_ms": {"p50": 1500.0, "p99": 62_000.0}, "tbt_ms": {"p50": 12.5, "p99": None}}
    second = [figures(250, kv_blocks={"total": 40, "peak": 40, "mean": 1}, **slow), figures(270, **slow)]
    result, _ = run({8: [figures(100), figures(140)], 4: second}, 2)
    header, first, other = cells(result)
    assert header == [
        *("variant", "output tokens/s", "ratio", "TTFT p50", "p99", "TBT p50", "p99", "peak KV", "mean batch"),
        *("preemptions", "peak memory"),
    ]
    # 10 of 40 blocks of 40 MiB; the second's median peak is (40 + 10) / 2 = 25 blocks. 260 / 120 = 2.17
    assert first == [
        *("max_num_seqs=8", "120.0 (100.0-140.0)", "1.00x", "20 ms", "40 ms", "20 ms", "40 ms", "10 MiB (25%)"),
        *("2.5", "0", "512 MiB"),
    ]
    assert other == [
        *("max_num_seqs=4", "260.0 (250.0-270.0)", "2.17x", "1.5 s", "1m 02s", "12.5 ms", "-", "25 MiB (62%)"),
        *("2.5", "0", "512 MiB"),
    ]


def test_columns_stand_under_each_other():
    result, _ = run({8: [figures(100)], 4: [figures(12_345.6)]}, 1)
    lines = comparison_table(result).split("\n")
    assert len({len(line) for line in lines}) == 1


def test_energy_is_shown_where_each_run_has_it_and_caching_where_it_differs():
    result, _ = run({8: [figures(energy_joules=1200.4)], 4: [figures(energy_joules=900.0)]}, 1)
    header, first, other = cells(result)
    assert (header[-1], first[-1], other[-1]) == ("CPU energy", "1,200 J", "900 J")
    result, _ = run(
        {8: [figures(energy_joules=1200.4)], 4: [figures(cached_prompt_tokens=16, recomputed_tokens=1234)]}, 1
    )
    header, first, other = cells(result)
    assert "CPU energy" not in header
    for title, text in (("prompt tokens cached", "16"), ("recomputed tokens", "1,234")):
        place = header.index(title)
        assert (first[place], other[place]) == ("0", text)
