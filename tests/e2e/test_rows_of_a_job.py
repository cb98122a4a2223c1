"""Each row of a whole job gets exactly one answer, its own, whatever its neighbours, its order and its faults."""

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_tokenizers import BOS, EOS, SHIFT, ids_of
from tiny_jobs import CONTEXT, call, read_rows, save_tiny_model, without_times, write_jsonl, write_parquet

SAMPLE_DATA = Path(__file__).parents[2] / "sample_data"


def run(model: Path, input_path: Path, *options: object) -> list[dict[str, Any]]:
    output = input_path.with_name("out")
    assert call(model, "--input", input_path, "--output", output, "--overwrite", *options) == 0
    return read_rows(output)


def stats(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "out" / "_stats.json").read_text())


def test_output_order_is_input_order_though_rows_end_in_another(tmp_path: Path, tiny_model: Path) -> None:
    lengths = [90, 1, 50, 2, 120, 3, 70, 1, 10, 30]
    rows = [{"id": i, "prompt": f"row {i}", "max_tokens": n, "ignore_eos": True} for i, n in enumerate(lengths)]
    answers = run(tiny_model, write_jsonl(tmp_path / "in.jsonl", rows), "--max-num-seqs", 3)
    assert [row["id"] for row in answers] == list(range(10))
    assert [row["completion_tokens"] for row in answers] == lengths
    assert [row["request_id"] for row in answers] == [f"0-{i}-0" for i in range(10)]


def test_rows_with_one_id_are_answered_each_by_its_own_prompt(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"custom_id": "a", "prompt": text, "max_tokens": 8} for text in ("one", "two", "one")]
    rows.append({"custom_id": "b", "prompt": "two", "max_tokens": 8})
    path = write_jsonl(tmp_path / "in.jsonl", rows)
    answers = run(tiny_model, path, "--temperature", 0)
    assert "column `custom_id` repeats 'a'" in capsys.readouterr().err
    texts = [row["completion"] for row in answers]
    assert texts[0] == texts[2] != texts[1] == texts[3]
    assert call(tiny_model, "--input", path, "--output", tmp_path / "new", "--unique-id", "custom_id") == 2
    assert not (tmp_path / "new").exists()


def test_an_overlong_prompt_fails_alone(tmp_path: Path, tiny_model: Path) -> None:
    rows = [{"prompt": "short"}, {"prompt": "x" * 10_000}, {"prompt": "short"}]
    path = write_jsonl(tmp_path / "in.jsonl", rows)
    first, second, third = run(tiny_model, path, "--max-tokens", 4, "--temperature", 0)
    assert second["error_code"] == "prompt_too_long"
    assert second["finish_reason"] == "error"
    assert second["completion"] is second["prompt_tokens"] is second["ttft_ms"] is second["latency_ms"] is None
    assert first["completion"] == third["completion"] is not None
    _, cut, _ = run(tiny_model, path, "--max-tokens", 4, "--on-too-long", "truncate-left")
    assert cut["prompt_tokens"] + 4 == CONTEXT


def test_null_nan_and_empty_prompts_are_rows_and_never_the_text_nan(tmp_path: Path, tiny_model: Path) -> None:
    answers = run(
        tiny_model, write_jsonl(tmp_path / "in.jsonl", [{"prompt": p} for p in ("a", None, "")]), "--max-tokens", 2
    )
    assert [row["error_code"] for row in answers] == [None, "null_prompt", None]
    assert [row["prompt_tokens"] for row in answers] == [2, None, 1]  # with the BOS, which is all of the empty one

    path = write_parquet(tmp_path / "in.parquet", [{"prompt": math.nan}], pa.schema([("prompt", pa.float64())]))
    (row,) = run(tiny_model, path)
    assert row["error_code"] == "null_prompt"


def test_an_empty_prompt_without_bos_fails_alone(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", adds_bos=False)
    path = write_jsonl(tmp_path / "in.jsonl", [{"prompt": p} for p in ("", "a")])
    empty, other = run(model, path, "--max-tokens", 3, "--ignore-eos")
    assert empty["error_code"] == "empty_prompt"
    assert (other["prompt_tokens"], other["completion_tokens"]) == (1, 3)


def test_without_max_tokens_the_room_left_and_with_0_a_score(tmp_path: Path, tiny_model: Path) -> None:
    rows = [{"prompt": "abc", "max_tokens": n} for n in (None, 0, -1, 10_000)]
    answers = run(tiny_model, write_jsonl(tmp_path / "in.jsonl", rows), "--ignore-eos", "--prompt-logprobs")
    assert [row["completion_tokens"] for row in answers] == [CONTEXT - 4, 0, None, CONTEXT - 4]
    assert [row["finish_reason"] for row in answers] == ["length", "length", "error", "length"]
    assert answers[2]["error_code"] == "bad_parameter"
    assert answers[1]["prompt_logprobs"] == answers[0]["prompt_logprobs"]
    assert answers[1]["prompt_logprobs"]["count"] == 3


@pytest.fixture(scope="module")
def model_with_generation_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its generation_config ends at "b" and "c" beside the tokenizer's own end, and draws with these parameters."""
    model = save_tiny_model(tmp_path_factory.mktemp("configured") / "model")
    sampling = {"do_sample": True, "temperature": 0.7, "top_k": 20, "repetition_penalty": 1.1}
    config = {"eos_token_id": [SHIFT + ord("b"), SHIFT + ord("c")], **sampling}
    (model / "generation_config.json").write_text(json.dumps(config))
    return model


@pytest.mark.parametrize("token_id", [EOS, SHIFT + ord("b"), SHIFT + ord("c")])
def test_any_end_of_the_union_ends_a_row(tmp_path: Path, model_with_generation_config: Path, token_id: int) -> None:
    forced = {"logit_bias": {str(token_id): 10_000.0}, "prompt": "Who are you?", "max_tokens": 9}
    rows = [forced, {**forced, "ignore_eos": True}, {**forced, "min_tokens": 5}]
    path = write_jsonl(tmp_path / "in.jsonl", rows)
    stopped, ignored, late = run(model_with_generation_config, path)
    assert (stopped["finish_reason"], stopped["completion_tokens"], stopped["completion"]) == ("stop", 1, "")
    assert (ignored["finish_reason"], ignored["completion_tokens"]) == ("length", 9)
    assert (late["finish_reason"], late["completion_tokens"]) == ("stop", 6)


def test_sampling_of_the_generation_config_is_said_stored_and_overridden(
    tmp_path: Path, model_with_generation_config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a"}])
    run(model_with_generation_config, path, "--max-tokens", 2, "--temperature", 0.2)
    lines = capsys.readouterr().err.splitlines()
    (said,) = [line for line in lines if line.startswith("batchinfer: sampling of rows that do not choose: ")]
    assert "max_tokens=2, temperature=0.2 (flag); top_k=20, repetition_penalty=1.1 (generation_config); " in said
    assert "min_tokens=0, top_p=1.0, min_p=0.0, stop=none, " in said
    options = stats(tmp_path)["options"]
    assert options["repetition_penalty"] == {"value": 1.1, "source": "generation_config"}
    assert options["temperature"] == {"value": 0.2, "source": "flag"}
    assert options["top_p"] == {"value": 1.0, "source": "default"}
    metadata = pa.parquet.read_schema(tmp_path / "out" / "part-00000.parquet").metadata
    assert json.loads(metadata[b"batchinfer.options"]) == options


def test_a_row_wins_over_the_flag_and_the_flag_over_the_generation_config(
    tmp_path: Path, model_with_generation_config: Path
) -> None:
    greedy = [{"prompt": "abc", "temperature": t, "max_tokens": 12, "ignore_eos": True} for t in (0, None)]
    path = write_jsonl(tmp_path / "in.jsonl", greedy)
    from_row, from_flag = run(model_with_generation_config, path, "--temperature", 0, "--seed", 1)
    assert from_row["completion"] == from_flag["completion"]
    same, drawn = run(model_with_generation_config, path, "--seed", 1)
    assert same["completion"] == from_row["completion"] != drawn["completion"]


def mixed_rows(count: int, max_tokens: int, **fields: Any) -> list[dict[str, Any]]:
    """Prompts of many lengths, every other row greedy, the rest drawn, some by their own seeds."""
    rows = []
    for i in range(count):
        row = {"prompt": f"{i} " + "ab " * (7 * i % 11), "max_tokens": max_tokens, "ignore_eos": True}
        rows.append(row | {"temperature": float(i % 2), "seed": 5 if i % 4 == 1 else None} | fields)
    return rows


def test_answers_do_not_depend_on_the_batch(tmp_path: Path, tiny_model: Path) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", mixed_rows(8, 20))
    alone = run(tiny_model, path, "--max-num-seqs", 1, "--output-token-ids", "--logprobs", 1)
    together = run(tiny_model, path, "--max-num-seqs", 8, "--output-token-ids", "--logprobs", 1)
    assert stats(tmp_path)["batch_size"]["peak"] == 8
    assert without_times(alone) == without_times(together)


def test_rows_preempted_again_and_again_get_the_answers_of_an_ample_cache(tmp_path: Path, tiny_model: Path) -> None:
    """A cache of two sequences for eight rows, of which some have two samples."""
    rows = [{**row, "n": 1 + i % 3 // 2} for i, row in enumerate(mixed_rows(8, 180))]
    path = write_jsonl(tmp_path / "in.jsonl", rows)
    ample = run(tiny_model, path, "--output-token-ids")
    assert sum(row["num_preemptions"] for row in ample) == 0
    bytes_per_token = 2 * 4 * 2 * 2 * 16  # keys and values in float32, 2 layers, 2 heads of 16
    cache = ["--kv-cache-memory", 2 * CONTEXT * bytes_per_token, "--admission", "greedy"]
    scarce = run(tiny_model, path, *cache, "--output-token-ids")
    assert sum(row["num_preemptions"] for row in scarce) > 0
    assert stats(tmp_path)["preemptions"] == sum(row["num_preemptions"] for row in scarce)
    assert without_times(scarce) == without_times(ample)
    assert [len(row["completion_token_ids"]) for row in scarce] == [180] * 10


def test_a_chat_and_its_rendered_text_have_one_bos(tmp_path: Path, tiny_model: Path) -> None:
    chat = write_jsonl(tmp_path / "chat.jsonl", [{"messages": [{"role": "user", "content": "hi"}]}])
    text = "<|begin|><|header|>user\nhi<|end|><|header|>assistant\n"
    (answer,) = run(tiny_model, chat, "--max-tokens", 4, "--temperature", 0)
    (rendered,) = run(tiny_model, write_jsonl(tmp_path / "text.jsonl", [{"prompt": text}]), "--max-tokens", 4)
    ids = [BOS, 2, *ids_of("user\nhi"), EOS, 2, *ids_of("assistant\n")]
    (given,) = run(tiny_model, write_jsonl(tmp_path / "ids.jsonl", [{"prompt_token_ids": ids}]), "--temperature", 0)
    assert answer["prompt_tokens"] == rendered["prompt_tokens"] == given["prompt_tokens"] == len(ids)
    assert given["completion"].startswith(answer["completion"])


def test_troublesome_sample(tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out"
    assert call(tiny_model, "--input", SAMPLE_DATA / "troublesome.jsonl", "--output", output, "--temperature", 0) == 0
    by_id: dict[str | None, list[dict[str, Any]]] = {}
    for row in read_rows(output):
        by_id.setdefault(row["id"], []).append(row)
    codes = {key: [row["error_code"] for row in rows] for key, rows in by_id.items()}
    long_for_the_tiny_model = ["prompt_too_long"]
    assert codes == {
        "plain": [None],
        "twin": [None, None],
        "null": ["null_prompt"],
        "missing": ["null_prompt"],
        "empty": [None],  # this tokenizer adds a BOS
        "number": ["bad_prompt"],
        "too-long": long_for_the_tiny_model,
        None: ["unreadable_line", "unreadable_line"],
        "bad-top-p": ["bad_parameter"],
        "bad-max-tokens": ["bad_parameter"],
        "bad-logit-bias": ["bad_parameter"],
        "emoji": [None],
        "last": [None],
    }
    assert by_id["twin"][0]["completion"] == by_id["twin"][1]["completion"] == by_id["plain"][0]["completion"]
    assert "line 9" in by_id[None][0]["error_message"]
    assert "top_p = 7.5" in by_id["bad-top-p"][0]["error_message"]
    assert json.loads((output / "_stats.json").read_text())["errors_by_code"] == {
        "bad_parameter": 3,
        "bad_prompt": 1,
        "null_prompt": 2,
        "prompt_too_long": 1,
        "unreadable_line": 2,
    }


def test_chats_sample_with_contents_as_text_and_as_parts(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "chats.jsonl").write_bytes((SAMPLE_DATA / "chats.jsonl").read_bytes())
    answers = run(tiny_model, tmp_path / "chats.jsonl", "--on-too-long", "truncate-left")
    rows = [json.loads(line) for line in (SAMPLE_DATA / "chats.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["id"] for row in answers] == [row["id"] for row in rows]
    assert {row["error_code"] for row in answers} == {None}


def test_text_that_is_not_utf8_is_a_fault_of_its_row(tmp_path: Path, tiny_model: Path) -> None:
    offsets = pa.array([0, 5, 7, 13], pa.int32()).buffers()[1]
    prompts = pa.StringArray.from_buffers(3, offsets, pa.py_buffer(b"go on\xff\xfeand on"))
    pq.write_table(pa.table({"prompt": prompts, "id": [1, 2, 3]}), tmp_path / "in.parquet")
    assert call(tiny_model, "--input", tmp_path / "in.parquet", "--output", tmp_path / "out", "--max-tokens", 2) == 0
    table = pq.read_table(tmp_path / "out" / "part-00000.parquet")
    assert table["error_code"].to_pylist() == [None, "bad_prompt", None]
    assert table["prompt"].combine_chunks().buffers()[2].to_pybytes() == b"go on\xff\xfeand on"
