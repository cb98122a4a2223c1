import dataclasses
import json
import math
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from small_tokenizers import (
    BOS,
    EOS,
    HEADER,
    LLAMA3_TEMPLATE,
    MISTRAL_TEMPLATE,
    VOCAB_SIZE,
    ids_of,
    save_byte_level,
)

from batchinfer.config import InputConfig
from batchinfer.data.messages import parse_messages
from batchinfer.data.prompts import PromptBuilder, choose_param_columns, choose_source
from batchinfer.data.tokenizer import Tokenizer
from batchinfer.errors import ErrorCode, RowError, UsageError
from batchinfer.request import Request, RequestId, SamplingParams, make_noise_key

JSON = {b"batchinfer": b"json"}


class Rows(NamedTuple):
    """What PromptBuilder takes of a readers.RowBatch."""

    start: int
    table: pa.RecordBatch
    errors: dict


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return Tokenizer.load(save_byte_level(tmp_path_factory.mktemp("llama"), chat_template=LLAMA3_TEMPLATE))


@pytest.fixture(scope="module")
def mistral(tmp_path_factory):
    return Tokenizer.load(save_byte_level(tmp_path_factory.mktemp("mistral"), chat_template=MISTRAL_TEMPLATE))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return Tokenizer.load(save_byte_level(tmp_path_factory.mktemp("gpt2"), adds_bos=False))


def batch_of(columns, types=None):
    arrays = {name: pa.array(values, (types or {}).get(name)) for name, values in columns.items()}
    return pa.RecordBatch.from_pydict(arrays)


def build(tokenizer, batch, *, start=0, shard=0, errors=None, config=None, params="auto", **options):
    source = choose_source(InputConfig(**(config or {})), batch.schema)
    options = {"defaults": SamplingParams(), "vocab_size": VOCAB_SIZE, "max_model_len": 1000} | options
    columns = choose_param_columns(params, source, batch.schema)
    builder = PromptBuilder(source=source, tokenizer=tokenizer, param_columns=columns, **options)
    return builder.build(shard, Rows(start, batch, errors or {}))


def ids(entries):
    return [entry.prompt_token_ids.tolist() if isinstance(entry, Request) else entry.error_code for entry in entries]


def codes(entries):
    return [None if isinstance(entry, Request) else entry.error_code for entry in entries]


# Choosing the source


@pytest.mark.parametrize("name", ["prompt", "messages", "prompt_token_ids"])
def test_the_one_known_column_is_detected(name):
    source = choose_source(InputConfig(), pa.schema({"id": pa.int64(), name: pa.string()}))
    assert (source.kind, source.column, source.columns) == (name, name, (name,))
    assert f"`{name}`" in source.describe()
    assert "detected" in source.describe()


def test_two_known_columns_need_a_choice():
    columns = pa.schema({"prompt": pa.string(), "messages": pa.string()})
    with pytest.raises(UsageError, match="--prompt-column prompt or --messages-column messages"):
        choose_source(InputConfig(), columns)
    assert choose_source(InputConfig(messages_column="messages"), columns).kind == "messages"


def test_no_known_column_lists_those_there_are():
    with pytest.raises(UsageError, match="the columns are `id`, `question`"):
        choose_source(InputConfig(), pa.schema({"id": pa.int64(), "question": pa.string()}))


def test_a_named_column_must_be_there():
    columns = pa.schema({"id": pa.int64(), "question": pa.string()})
    assert choose_source(InputConfig(prompt_column="question"), columns).column == "question"
    with pytest.raises(UsageError, match=r"--prompt-column text: no such column .* `id`, `question`"):
        choose_source(InputConfig(prompt_column="text"), columns)


def test_every_shard_must_have_the_column():
    has, lacks = pa.schema({"id": pa.int64(), "prompt": pa.string()}), pa.schema({"id": pa.int64()})
    with pytest.raises(UsageError, match="the columns are `id`"):
        choose_source(InputConfig(), has, lacks)


def test_template_columns_are_checked_at_the_start(tmp_path):
    columns = pa.schema({"question": pa.string(), "context": pa.string(), "id": pa.int64()})
    source = choose_source(InputConfig(template="{{ question }} {% for i in range(2) %}{{ i }}{% endfor %}"), columns)
    assert source.columns == ("question",)
    assert "`question`" in source.describe()
    with pytest.raises(UsageError, match="names `answer`, but the columns are `question`, `context`, `id`"):
        choose_source(InputConfig(template="{{ question }}{{ answer }}"), columns)
    with pytest.raises(UsageError, match="line 2"):
        choose_source(InputConfig(template="\n{{ question "), columns)
    with pytest.raises(UsageError, match="absent"):
        choose_source(InputConfig(template=f"@{tmp_path / 'absent'}"), columns)


# Raw text


def test_bad_prompts_are_errors_of_their_rows(llama):
    batch = batch_of({"prompt": ["a", None, "", " \n"]})
    entries = build(llama, batch, start=10, shard=2)
    assert ids(entries) == [[BOS, *ids_of("a")], ErrorCode.NULL_PROMPT, [BOS], [BOS, *ids_of(" \n")]]
    assert [entry.id for entry in entries] == [RequestId(2, row) for row in (10, 11, 12, 13)]
    assert entries[1].finish_reason == "error"
    assert (entries[1].text, entries[1].token_ids, entries[1].times) == (None, None, None)
    assert "prompt" in entries[1].error_message


def test_an_empty_prompt_without_bos_is_an_error(gpt2):
    assert ids(build(gpt2, batch_of({"prompt": ["", "b"]}))) == [ErrorCode.EMPTY_PROMPT, ids_of("b")]


def test_nan_is_null_and_numbers_are_bad(gpt2):
    assert codes(build(gpt2, batch_of({"prompt": [math.nan, 1.5, None]}))) == [
        ErrorCode.NULL_PROMPT,
        ErrorCode.BAD_PROMPT,
        ErrorCode.NULL_PROMPT,
    ]
    assert codes(build(gpt2, batch_of({"prompt": [b"bytes"]}))) == [ErrorCode.BAD_PROMPT]
    mixed = pa.RecordBatch.from_arrays(
        [pa.array(['"text"', "5", "null", "NaN", '"\\ud800"'])],
        schema=pa.schema([pa.field("prompt", pa.string(), metadata=JSON)]),
    )
    expected = [ids_of("text"), ErrorCode.BAD_PROMPT, ErrorCode.NULL_PROMPT, ErrorCode.NULL_PROMPT, "bad_prompt"]
    assert ids(build(gpt2, mixed)) == expected


def test_unreadable_lines(gpt2):
    batch = batch_of({"prompt": ["a", None, "c"]})
    entries = build(gpt2, batch, errors={1: "line 2: not JSON"})
    assert codes(entries) == [None, ErrorCode.UNREADABLE_LINE, None]
    assert entries[1].error_message == "line 2: not JSON"


def test_dictionary_and_large_strings(gpt2):
    for kind in (pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())):
        batch = pa.RecordBatch.from_arrays([pa.array(["ab", None, "ab"], pa.string()).cast(kind)], ["prompt"])
        assert ids(build(gpt2, batch)) == [ids_of("ab"), ErrorCode.NULL_PROMPT, ids_of("ab")]


def test_the_tokenizer_may_know_tokens_that_the_model_lacks(gpt2):
    entries = build(gpt2, batch_of({"prompt": ["a", "<|end|>z"]}), vocab_size=ids_of("a")[0] + 1)
    assert codes(entries) == [None, ErrorCode.BAD_PROMPT]


# Token ids


def test_token_ids_are_taken_as_they_are(llama):
    batch = batch_of({"prompt_token_ids": [[5, 6], [], None, [VOCAB_SIZE], [-1], [3, None]]})
    assert ids(build(llama, batch)) == [
        [5, 6],
        ErrorCode.EMPTY_PROMPT,
        ErrorCode.NULL_PROMPT,
        *[ErrorCode.BAD_PROMPT] * 3,
    ]
    assert build(llama, batch)[0].prompt_token_ids.dtype == np.int32
    assert codes(build(llama, batch_of({"prompt_token_ids": [[1.5]]}))) == [ErrorCode.BAD_PROMPT]
    assert codes(build(llama, batch_of({"prompt_token_ids": ["1 2"]}))) == [ErrorCode.BAD_PROMPT]


# Chat


def chat(*turns):
    return [{"role": role, "content": content} for role, content in turns]


def test_one_bos_in_a_chat_and_in_its_rendered_text(llama):
    rendered = "<|begin|><|header|>user\nhi<|end|><|header|>assistant\n"
    expected = [BOS, HEADER, *ids_of("user\nhi"), EOS, HEADER, *ids_of("assistant\n")]
    assert ids(build(llama, batch_of({"messages": [chat(("user", "hi"))]}))) == [expected]
    assert ids(build(llama, batch_of({"prompt": [rendered, "hi"]}))) == [expected, [BOS, *ids_of("hi")]]


def test_a_template_that_raises_fails_its_row_alone(mistral):
    rows = [
        chat(("user", "a")),
        chat(("system", "s"), ("user", "u"), ("user", "v")),
        chat(("user", "a"), ("assistant", "b"), ("user", "c")),
    ]
    first, second, third = build(mistral, batch_of({"messages": rows}))
    assert first.prompt_token_ids.tolist() == [BOS, *ids_of("[INST] a [/INST]")]
    assert second.error_code == ErrorCode.TEMPLATE_ERROR
    assert "roles must alternate" in second.error_message
    assert third.prompt_token_ids.tolist() == [BOS, *ids_of("[INST] a [/INST]b[INST] c [/INST]")]


def test_content_as_text_and_as_parts_in_one_column(llama):
    texts = [
        json.dumps(chat(("user", "hi"))),
        json.dumps([{"role": "user", "content": [{"type": "text", "text": "hi"}]}]),
        json.dumps([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]),
        json.dumps(chat(("user", "a\nb"))),
    ]
    for metadata in (JSON, None):
        columns = pa.schema([pa.field("messages", pa.string(), metadata=metadata)])
        entries = build(llama, pa.RecordBatch.from_arrays([pa.array(texts)], schema=columns))
        assert ids(entries)[0] == ids(entries)[1]
        assert ids(entries)[2] == ids(entries)[3]
        assert ids(entries)[0] == [BOS, HEADER, *ids_of("user\nhi"), EOS, HEADER, *ids_of("assistant\n")]


def test_arrow_structs_lose_the_nulls_that_unification_put_there():
    rows = [
        [{"role": "user", "content": "hi"}],
        [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"x": 1}}, {"arguments": {"y": 2}}]}],
    ]
    values = pa.array(rows).to_pylist()
    assert values[0] == [{"role": "user", "content": "hi", "tool_calls": None}]
    assert [parse_messages(value) for value in values] == rows


def test_a_chat_that_ends_with_the_assistant_opens_a_new_turn(llama):
    (entry,) = build(llama, batch_of({"messages": [chat(("user", "a"), ("assistant", "b"))]}))
    expected = [HEADER, *ids_of("assistant\nb"), EOS, HEADER, *ids_of("assistant\n")]
    assert entry.prompt_token_ids.tolist()[-len(expected) :] == expected


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ("not json", ErrorCode.BAD_PROMPT),
        ('{"role": "user", "content": "x"}', ErrorCode.BAD_PROMPT),
        ("[]", ErrorCode.EMPTY_PROMPT),
        ('["hello"]', ErrorCode.BAD_PROMPT),
        ('[{"content": "x"}]', ErrorCode.BAD_PROMPT),
        ('[{"from": "human", "value": "x"}]', ErrorCode.BAD_PROMPT),
        ('[{"role": "user"}]', ErrorCode.BAD_PROMPT),
        ('[{"role": "user", "content": null}]', ErrorCode.BAD_PROMPT),
        ('[{"role": "user", "content": 5}]', ErrorCode.BAD_PROMPT),
        ('[{"role": "user", "content": [{"type": "image_url"}]}]', ErrorCode.BAD_PROMPT),
        ('[{"role": "user", "content": "\\ud800"}]', ErrorCode.BAD_PROMPT),
        (None, ErrorCode.NULL_PROMPT),
    ],
)
def test_malformed_chats(llama, value, code):
    good = json.dumps(chat(("user", "x"), ("narrator", "y")))
    bad, other = build(llama, batch_of({"messages": [value, good]}, {"messages": pa.string()}))
    assert bad.error_code == code
    assert isinstance(other, Request)


def test_messages_without_a_chat_template_are_refused_up_front(gpt2):
    with pytest.raises(UsageError, match="--chat-template"):
        build(gpt2, batch_of({"messages": ["[]"]}))


# --template


def test_a_template_over_the_columns(llama, tmp_path):
    batch = batch_of({"question": ["why?", "how?"], "tags": [["a", "b"], []]})
    (tmp_path / "t.jinja").write_text("Q: {{ question }}{% for t in tags %} #{{ t }}{% endfor %}\n")
    entries = build(llama, batch, config={"template": f"@{tmp_path / 't.jinja'}"})
    assert ids(entries) == [[BOS, *ids_of("Q: why? #a #b")], [BOS, *ids_of("Q: how?")]]


def test_a_template_sees_json_columns_decoded(gpt2):
    columns = pa.schema([pa.field("meta", pa.string(), metadata=JSON)])
    batch = pa.RecordBatch.from_arrays([pa.array(['{"city": "Oslo"}', '{"town": 1}', '"x"'])], schema=columns)
    entries = build(gpt2, batch, config={"template": "{{ meta.city }}"})
    assert ids(entries) == [ids_of("Oslo"), ErrorCode.TEMPLATE_ERROR, ErrorCode.TEMPLATE_ERROR]


def test_a_template_never_writes_a_null(gpt2):
    batch = batch_of({"a": [1.5, None, math.nan], "b": ["x", "y", "z"]})
    entries = build(gpt2, batch, config={"template": "{{ a }}{{ b }}"})
    assert ids(entries) == [ids_of("1.5x"), ErrorCode.NULL_PROMPT, ErrorCode.NULL_PROMPT]
    guarded = build(gpt2, batch, config={"template": "{% if a is not none %}{{ a }}{% endif %}{{ b }}"})
    assert ids(guarded)[1] == ids_of("y")


@pytest.mark.parametrize(
    "template",
    [
        "{{ a.__class__.__base__.__subclasses__() }}",
        "{{ tags.append(1) }}",
        "{% for i in range(10 ** 7) %}{% endfor %}{{ a }}",
        "{{ a / 0 }}",
    ],
)
def test_a_template_runs_in_a_sandbox(gpt2, template):
    batch = batch_of({"a": [1], "tags": [["x"]]})
    assert codes(build(gpt2, batch, config={"template": template})) == [ErrorCode.TEMPLATE_ERROR]


def test_a_column_that_one_batch_lacks_fails_there_alone(gpt2):
    both, one = batch_of({"a": ["x"], "b": ["y"]}), batch_of({"a": ["x"]})
    source = choose_source(InputConfig(template="{{ a }}{{ b }}"), both.schema)
    builder = PromptBuilder(
        source=source, tokenizer=gpt2, defaults=SamplingParams(), vocab_size=VOCAB_SIZE, max_model_len=100
    )
    assert ids(builder.build(0, Rows(0, both, {}))) == [ids_of("xy")]
    assert codes(builder.build(1, Rows(0, one, {}))) == [ErrorCode.TEMPLATE_ERROR]
    assert builder.columns == ("a", "b")


# Lengths


def test_an_overlong_prompt_fails_alone_and_says_the_numbers(gpt2):
    entries = build(gpt2, batch_of({"prompt": ["short", "x" * 10_000, "short"]}), max_model_len=4096)
    assert codes(entries) == [None, ErrorCode.PROMPT_TOO_LONG, None]
    assert "10000 tokens" in entries[1].error_message
    assert "4096" in entries[1].error_message
    assert [entry.id.row for entry in entries] == [0, 1, 2]


def test_max_tokens_is_the_room_left_at_most(gpt2):
    batch = batch_of({"prompt": ["x" * 4] * 4 + ["x" * 9, "x" * 10], "max_tokens": [None, 3, 6, 99, None, None]})
    entries = build(gpt2, batch, max_model_len=10)
    assert [entry.max_tokens for entry in entries[:5]] == [6, 3, 6, 6, 1]
    assert entries[3].params.max_tokens == 99
    assert entries[5].error_code == ErrorCode.PROMPT_TOO_LONG


def test_scoring_needs_no_room(gpt2):
    batch = batch_of({"prompt": ["x" * 10, "x" * 11]})
    entries = build(gpt2, batch, max_model_len=10, defaults=SamplingParams(max_tokens=0, prompt_logprobs=True))
    assert entries[0].max_tokens == 0
    assert entries[1].error_code == ErrorCode.PROMPT_TOO_LONG
    assert "11 tokens" in entries[1].error_message


TEXT = "abcdefghijklmnopqrstuvwxyz"


@pytest.mark.parametrize(
    ("how", "max_tokens", "kept"),
    [
        ("truncate-left", 4, TEXT[-16:]),
        ("truncate-right", 4, TEXT[:16]),
        ("truncate-left", None, TEXT[-15:]),  # a quarter of 20 left for the completion
        ("truncate-left", 500, TEXT[-10:]),  # at most half of it
        ("truncate-right", 0, TEXT[:20]),
    ],
)
def test_truncation_leaves_room_for_the_completion(gpt2, how, max_tokens, kept):
    batch = batch_of({"prompt": [TEXT, "short"], "max_tokens": pa.array([max_tokens, 1], pa.int64())})
    long, short = build(gpt2, batch, max_model_len=20, on_too_long=how)
    assert long.prompt_token_ids.tolist() == ids_of(kept)
    assert long.max_tokens == min(20 - len(kept), 20 if max_tokens is None else max_tokens)
    assert short.prompt_token_ids.tolist() == ids_of("short")


def test_truncation_on_the_left_keeps_the_bos(llama):
    (entry,) = build(
        llama, batch_of({"prompt": [TEXT], "max_tokens": [4]}), max_model_len=20, on_too_long="truncate-left"
    )
    assert entry.prompt_token_ids.tolist() == [BOS, *ids_of(TEXT[-15:])]


def test_the_smallest_context_still_keeps_a_token(gpt2):
    for how, kept in (("truncate-left", "z"), ("truncate-right", "a")):
        (entry,) = build(gpt2, batch_of({"prompt": [TEXT]}), max_model_len=2, on_too_long=how)
        assert entry.prompt_token_ids.tolist() == ids_of(kept)
        assert entry.max_tokens == 1


# Parameters and samples


def test_samples_are_consecutive_and_a_bad_row_is_one_result(gpt2):
    batch = batch_of({"prompt": ["a", None, "c"], "n": [2, 3, 1]})
    entries = build(gpt2, batch, start=7, shard=1)
    places = [(1, 7, 0), (1, 7, 1), (1, 8, 0), (1, 9, 0)]
    assert [dataclasses.astuple(entry.id) for entry in entries] == places
    assert codes(entries) == [None, None, ErrorCode.NULL_PROMPT, None]


def test_noise_keys_follow_the_row_or_its_seed(gpt2):
    batch = batch_of({"prompt": ["a", "a", "a"], "seed": [None, 42, 42]})
    here, seeded, again = build(gpt2, batch, start=5, seed=3)
    assert here.noise_key == make_noise_key(RequestId(0, 5), None, 3)
    assert seeded.noise_key == again.noise_key == make_noise_key(RequestId(9, 9), 42, 0)
    assert here.noise_key != seeded.noise_key
    first, second = build(gpt2, batch_of({"prompt": ["a"], "n": [2]}), start=5, seed=3)
    assert first.noise_key == here.noise_key != second.noise_key


def test_parameters_outside_the_vocabulary_fail_their_row_before_the_engine(gpt2):
    bias = [None] * 3 + ['{"999999": 5}'] + [None] * 4
    entries = build(gpt2, batch_of({"prompt": ["a"] * 8, "logit_bias": bias}))
    assert codes(entries) == [None] * 3 + [ErrorCode.BAD_PARAMETER] + [None] * 4
    assert "999999" in entries[3].error_message
    assert f"from 0 to {VOCAB_SIZE - 1}" in entries[3].error_message
    assert all(entry.params == SamplingParams() for entry in entries if isinstance(entry, Request))


def test_default_parameters_outside_the_vocabulary_end_the_job_at_once(gpt2):
    with pytest.raises(UsageError, match="stop_token_ids has token id 5000"):
        build(gpt2, batch_of({"prompt": ["a"]}), defaults=SamplingParams(stop_token_ids=(5000,)))


def test_negative_max_tokens_is_a_parameter_error(gpt2):
    entries = build(gpt2, batch_of({"prompt": ["a", "b"], "max_tokens": [-1, None]}))
    assert codes(entries) == [ErrorCode.BAD_PARAMETER, None]
    assert "0 or more" in entries[0].error_message


def test_param_columns_none_leaves_a_weather_table_alone(gpt2):
    batch = batch_of({"prompt": ["a", "b"], "temperature": [-3.0, 41.5]})
    assert [entry.params.temperature for entry in build(gpt2, batch, params="none")] == [1.0, 1.0]
    assert codes(build(gpt2, batch, params="auto")) == [ErrorCode.BAD_PARAMETER, None]


def test_values_and_parameters_can_be_given_directly(gpt2):
    source = choose_source(InputConfig(), pa.schema({"prompt": pa.string()}))
    builder = PromptBuilder(
        source=source, tokenizer=gpt2, defaults=SamplingParams(), vocab_size=VOCAB_SIZE, max_model_len=100
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=2)
    failed = RowError(ErrorCode.BAD_PARAMETER, "bad")
    first, second, third = builder.build_values(0, 0, ["a", 5, "c"], [greedy, greedy, failed])
    assert (first.params, first.max_tokens, first.prompt_token_ids.tolist()) == (greedy, 2, ids_of("a"))
    assert second.error_code == ErrorCode.BAD_PROMPT
    assert (third.error_code, third.error_message) == (ErrorCode.BAD_PARAMETER, "bad")
