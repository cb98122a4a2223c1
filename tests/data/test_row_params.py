import json
import math

import pyarrow as pa
import pytest

from batchinfer.config import InputConfig, SamplingConfig
from batchinfer.data.prompts import choose_param_columns, choose_source
from batchinfer.data.row_params import ParamColumns
from batchinfer.data.sampling_defaults import resolve_sampling
from batchinfer.errors import ErrorCode, RowError, UsageError
from batchinfer.request import SamplingParams

JSON = {b"batchinfer": b"json"}


def parse(columns, names=None, defaults=None, vocab_size=100):
    batch = columns if isinstance(columns, pa.RecordBatch) else pa.RecordBatch.from_pydict(columns)
    steering = ParamColumns(tuple(names or batch.schema.names))
    return steering.parse(batch, defaults or SamplingParams(), vocab_size)


def choose(option, schema, **config):
    source = choose_source(InputConfig(**config), schema)
    return choose_param_columns(option, source, schema)


def schema(**types):
    return pa.schema({"prompt": pa.string(), **types})


# Which columns steer


def test_auto_takes_parameters_whose_type_fits():
    columns = choose(
        "auto",
        schema(
            temperature=pa.float32(),
            max_tokens=pa.int16(),
            top_k=pa.float64(),
            min_p=pa.decimal128(4, 2),
            stop=pa.list_(pa.string()),
            stop_token_ids=pa.large_list(pa.int64()),
            logit_bias=pa.map_(pa.string(), pa.float64()),
            ignore_eos=pa.bool_(),
            seed=pa.uint64(),
            city=pa.string(),
            logprobs=pa.int64(),
        ),
    )
    assert set(columns.names) == {
        *("temperature", "max_tokens", "top_k", "min_p", "stop", "stop_token_ids", "logit_bias", "ignore_eos", "seed")
    }
    assert "--param-columns none" in columns.describe()
    assert "`temperature`" in columns.describe()
    assert "city" not in columns.describe()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("temperature", pa.string()),
        ("n", pa.list_(pa.int64())),
        ("ignore_eos", pa.int64()),
        ("stop", pa.timestamp("us")),
        ("stop_token_ids", pa.list_(pa.string())),
        ("logit_bias", pa.float64()),
        ("seed", pa.bool_()),
    ],
)
def test_auto_leaves_out_columns_of_another_type_and_says_so(name, kind):
    columns = choose("auto", schema(**{name: kind}))
    assert columns.names == ()
    assert f"`{name}` does not: its type is {kind}" in columns.describe()


def test_auto_leaves_out_what_the_prompt_is_made_of():
    weather = pa.schema({"city": pa.string(), "temperature": pa.float64(), "max_tokens": pa.int64()})
    columns = choose("auto", weather, template="Is {{ temperature }} warm for {{ city }}?")
    assert columns.names == ("max_tokens",)
    assert choose("auto", pa.schema({"stop": pa.string()}), prompt_column="stop").names == ()


def test_auto_takes_json_text_and_all_null_columns():
    mixed = pa.schema(
        [
            pa.field("prompt", pa.string()),
            pa.field("temperature", pa.string(), metadata=JSON),
            pa.field("top_p", pa.null()),
        ]
    )
    assert choose("auto", mixed).names == ("temperature", "top_p")


def test_auto_looks_at_all_shards():
    source = choose_source(InputConfig(), schema(), schema(n=pa.int64()))
    assert choose_param_columns("auto", source, schema(), schema(n=pa.int64())).names == ("n",)
    assert choose_param_columns("auto", source, schema(n=pa.string()), schema(n=pa.int64())).names == ()


def test_none_and_named_columns():
    columns = schema(temperature=pa.float64(), n=pa.int64())
    assert choose("none", columns).names == ()
    assert "no column steers" in choose("none", columns).describe()
    assert choose("n", columns).names == ("n",)
    assert choose("n, temperature,n", columns).names == ("n", "temperature")
    with pytest.raises(UsageError, match="`city` is not a row parameter; they are max_tokens"):
        choose("city", columns)
    with pytest.raises(UsageError, match="no column `top_p`; the columns are `prompt`, `temperature`, `n`"):
        choose("top_p", columns)
    with pytest.raises(UsageError, match="must be auto, none or names"):
        choose(" , ", columns)


# Values


def test_row_values_override_defaults_and_nulls_do_not():
    defaults = SamplingParams(temperature=0.5, max_tokens=7)
    rows = parse({"temperature": [0.0, None], "max_tokens": [None, 3]}, defaults=defaults)
    assert rows == [SamplingParams(temperature=0.0, max_tokens=7), SamplingParams(temperature=0.5, max_tokens=3)]


def test_rows_without_parameters_share_the_defaults():
    defaults = SamplingParams()
    rows = parse(pa.RecordBatch.from_pydict({"x": [1, 2, 3]}), names=["temperature"], defaults=defaults)
    assert all(row is defaults for row in rows)
    first, second, third = parse({"n": [2, 2, 3]})
    assert first is second
    assert third.n == 3


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("max_tokens", 5.0, 5),
        ("max_tokens", 0, 0),
        ("temperature", 1, 1.0),
        ("seed", 2**63 + 5, 2**63 + 5),
        ("ignore_eos", True, True),
        ("stop", "\n", ("\n",)),
        ("stop", '["a", "b"]', ("a", "b")),
        ("stop", "[END]", ("[END]",)),
        ("stop", "[1]", ("[1]",)),
        ("stop", ["x", "y"], ("x", "y")),
        ("stop", [], ()),
        ("stop_token_ids", [1, 99], (1, 99)),
        ("stop_token_ids", "[1, 2.0]", (1, 2)),
        ("logit_bias", '{"42": -1.5}', ((42, -1.5),)),
        ("logit_bias", {"42": -1.5, "7": 2.0}, ((42, -1.5), (7, 2.0))),
    ],
)
def test_values_that_are_read(name, value, read):
    (params,) = parse({name: pa.array([value], pa.uint64() if name == "seed" else None)})
    assert getattr(params, name) == read
    assert type(getattr(params, name)) is type(read)


def test_a_struct_of_biases_has_nulls_where_a_row_lacks_the_key():
    rows = parse({"logit_bias": [{"1": 2.0}, {"3": 4.0}, None]})
    assert [row.logit_bias for row in rows] == [((1, 2.0),), ((3, 4.0),), ()]


def test_a_map_of_biases():
    biases = pa.array([[(5, 1.0), (6, -1.0)]], pa.map_(pa.int64(), pa.float64()))
    (params,) = parse(pa.RecordBatch.from_arrays([biases], ["logit_bias"]))
    assert params.logit_bias == ((5, 1.0), (6, -1.0))


def test_json_text_columns_are_decoded_first():
    field = pa.field("stop", pa.string(), metadata=JSON)
    texts = [json.dumps("END"), json.dumps(["a", "b"]), "null", None, "3"]
    rows = parse(pa.RecordBatch.from_arrays([pa.array(texts)], schema=pa.schema([field])))
    assert [row.stop for row in rows[:4]] == [("END",), ("a", "b"), (), ()]
    assert isinstance(rows[4], RowError)


BAD = [
    ("max_tokens", -1, "0 or more"),
    ("max_tokens", 1.5, "an integer"),
    ("max_tokens", math.nan, "an integer"),
    ("max_tokens", math.inf, "an integer"),
    ("max_tokens", True, "an integer"),
    ("max_tokens", "5", "an integer"),
    ("temperature", -3.0, "0 or more"),
    ("temperature", math.nan, "0 or more"),
    ("temperature", "hot", "a number"),
    ("temperature", True, "a number"),
    ("top_p", 0.0, "above 0 and at most 1"),
    ("min_p", 1.5, "from 0 to 1"),
    ("top_k", -2, "1 or more, or 0 or -1"),
    ("n", 0, "from 1 to"),
    ("n", 10**9, "from 1 to"),
    ("repetition_penalty", 0.0, "above 0"),
    ("presence_penalty", 2.5, "from -2 to 2"),
    ("frequency_penalty", -2.5, "from -2 to 2"),
    ("ignore_eos", 1, "true or false"),
    ("stop", [""], "non-empty"),
    ("stop", [None], "a list of strings"),
    ("stop", 5, "a string"),
    ("stop_token_ids", [-1], "from 0 to 99"),
    ("stop_token_ids", [100], "from 0 to 99"),
    ("stop_token_ids", [None], "a list of token ids"),
    ("stop_token_ids", "1,2", "a list of token ids"),
    ("logit_bias", '{"999999": 5}', "from 0 to 99"),
    ("logit_bias", '{"-1": 5}', "from 0 to 99"),
    ("logit_bias", '{"x": 5}', "token id to number"),
    ("logit_bias", '{"1": "x"}', "token id to number"),
    ("logit_bias", '{"1": NaN}', "finite"),
    ("logit_bias", "[1, 2]", "token id to number"),
    ("logit_bias", "nonsense", "token id to number"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), BAD)
def test_a_bad_value_is_an_error_of_its_row_alone(name, value, allowed):
    good = SamplingParams()
    bad, other = parse({name: [value, None]})
    assert isinstance(bad, RowError)
    assert bad.code == ErrorCode.BAD_PARAMETER
    assert name in bad.message
    assert allowed in bad.message
    assert other == good


def test_rules_between_parameters():
    row, flag = parse({"min_tokens": [5, 5], "max_tokens": [4, None]}, defaults=SamplingParams(max_tokens=3))
    assert "min_tokens = 5: must be at most max_tokens (4)" in row.message
    assert "min_tokens = 5: must be at most max_tokens (3)" in flag.message


def test_in_auto_the_error_says_that_the_column_may_be_data():
    weather = schema(temperature=pa.float64())
    columns = choose("auto", weather)
    batch = pa.RecordBatch.from_pydict({"prompt": ["a", "b"], "temperature": [-3.0, 0.5]}, schema=weather)
    bad, good = columns.parse(batch, SamplingParams(), 100)
    assert "--param-columns none" in bad.message
    assert good.temperature == 0.5


def test_a_temperature_often_beyond_2_is_data_and_a_rare_one_is_a_fault_of_its_row():
    columns = choose("auto", schema(temperature=pa.float64(), top_p=pa.float64()))
    rare, often = [0.7, 1.0] * 9 + [None, 25.0, 1.0], [0.7, 1.0] * 4 + [None, 25.0]
    assert columns.without_data({"temperature": rare}).names == ("temperature", "top_p")
    weather = columns.without_data({"temperature": often})
    assert weather.names == ("top_p",)
    assert "`temperature` does not: it holds values such as 25" in weather.describe()


# Defaults


def test_precedence_of_defaults_and_their_sources():
    generation = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1, "do_sample": True}
    params, sources = resolve_sampling(SamplingConfig(temperature=0.0, stop=("x",), logit_bias='{"3": 1}'), generation)
    assert params == SamplingParams(
        temperature=0.0, top_p=0.8, top_k=20, repetition_penalty=1.1, stop=("x",), logit_bias=((3, 1.0),)
    )
    assert {name for name, source in sources.items() if source == "flag"} == {"temperature", "stop", "logit_bias"}
    taken = {name for name, source in sources.items() if source == "generation_config"}
    assert taken == {"top_p", "top_k", "repetition_penalty"}
    assert sources["min_p"] == sources["max_tokens"] == "default"
    assert parse({"repetition_penalty": [1.0, None]}, defaults=params)[0].repetition_penalty == 1.0


def test_without_anything_the_room_left_and_temperature_one():
    params, sources = resolve_sampling(SamplingConfig(), {})
    assert (params.max_tokens, params.temperature) == (None, 1.0)
    assert set(sources.values()) == {"default"}


def test_generation_config_fields_that_do_not_count():
    params, _ = resolve_sampling(
        SamplingConfig(), {"do_sample": False, "max_length": 20, "top_k": None, "eos_token_id": [1, 2]}
    )
    assert params == SamplingParams()


def test_max_new_tokens_is_a_default_and_a_falsy_flag_is_still_a_flag():
    assert resolve_sampling(SamplingConfig(), {"max_new_tokens": 64})[0].max_tokens == 64
    params, sources = resolve_sampling(SamplingConfig(max_tokens=0, ignore_eos=False), {"max_new_tokens": 64})
    assert params.max_tokens == 0
    assert sources["max_tokens"] == sources["ignore_eos"] == "flag"


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ({"temperature": "warm"}, "temperature = 'warm': must be a number"),
        ({"top_k": 2.5}, "top_k = 2.5: must be an integer"),
        ({"top_p": 3}, "top_p = 3.0: must be above 0 and at most 1 .*generation_config"),
        ({"max_new_tokens": -1}, "max_tokens = -1"),
    ],
)
def test_bad_generation_config(generation, message):
    with pytest.raises(UsageError, match=message):
        resolve_sampling(SamplingConfig(), generation)


def test_options_that_contradict_the_generation_config():
    with pytest.raises(UsageError, match=r"min_tokens = 100: must be at most max_tokens \(64\)"):
        resolve_sampling(SamplingConfig(min_tokens=100), {"max_new_tokens": 64})
