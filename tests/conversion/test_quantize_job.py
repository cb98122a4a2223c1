"""Whole quantisations of a tiny model: what is written loads and means what the method chose, killed jobs carry on to
the same bytes, and what cannot be is refused in one line."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from batchinfer.conversion import quantize_job
from batchinfer.conversion.awq_layer import divided
from batchinfer.conversion.calibration_text import read_calibration_text
from batchinfer.conversion.memory import forecast
from batchinfer.conversion.options import QuantizeOptions, stated_options
from batchinfer.data.tokenizer import Tokenizer
from batchinfer.errors import BatchInferError, UsageError
from batchinfer.quantization.rounding import Grid, nearest

SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
TEXT = "A small text about cats, dogs, birds and the weather at sea. " * 40
LINEARS = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
SMALL = {"group_size": 32, "calibration_length": 64, "search_tokens": 128}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny random Llama in bf16 with tied embeddings and a byte-level tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, tie_word_embeddings=True, bos_token_id=None, eos_token_id=1)
    return save_with_tokenizer(LlamaForCausalLM(config), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def own_heads(tmp_path_factory):
    """A tiny random Qwen2, with biases on queries, keys and values, and a value head for each query head."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = SIZES | {"num_key_value_heads": 4, "num_hidden_layers": 2}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=True, bos_token_id=None, eos_token_id=1))
    for layer in model.model.layers:
        for name in "qkv":
            torch.nn.init.normal_(layer.self_attn.get_submodule(f"{name}_proj").bias, std=0.5)
    return save_with_tokenizer(model, tmp_path_factory.mktemp("own_heads"))


def save_with_tokenizer(model, path):
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model.to(torch.bfloat16).save_pretrained(path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(path)
    (path / "generation_config.json").write_text('{"eos_token_id": 1}')
    (path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return path


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return str(path)


def run(model, output, text_file, **options):
    lines = []
    options = QuantizeOptions(**{**SMALL, "calibration": text_file, **options})
    quantize_job.quantize_model(str(model), str(output), options, lines.append)
    return lines


def tensors(path):
    return load_file(path / "model.safetensors")


def files(path):
    return {p.name: p.read_bytes() for p in path.iterdir() if p.name != "batchinfer_quantize.json"}


ALL = [
    {"method": "awq"},
    {"method": "awq", "format": "compressed-tensors"},
    {"method": "gptq"},
    {"method": "gptq", "act_order": True},
    {"method": "gptq", "bits": 3, "symmetric": False},
    {"method": "gptq", "format": "awq"},
    {"method": "awq-gptq"},
    {"method": "gptq", "format": "compressed-tensors", "kv_cache_scales": True},
    {"method": "rtn", "bits": 8},
    {"method": "rtn", "group_size": -1},
    {"method": "fp8"},
    {"method": "fp8", "kv_cache_scales": True},
]


@pytest.mark.parametrize("options", ALL, ids=lambda options: "-".join(map(str, options.values())))
def test_what_is_written_loads_here_with_nothing_missing_or_left_over(model, text_file, tmp_path, options):
    from batchinfer.models.loader import load_decoder

    run(model, tmp_path / "out", text_file, **options)
    decoder = load_decoder(tmp_path / "out")
    assert decoder.spec.num_layers == 3
    written = files(tmp_path / "out")
    original = files(model)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        assert written[name] == original[name]
    assert not any(name.startswith("_") for name in written)


def test_rtn_is_the_nearest_weight_of_every_layer(model, tmp_path):
    run(model, tmp_path / "out", None, method="rtn", format="gptq")
    found, source = tensors(tmp_path / "out"), tensors(model)
    for layer in range(3):
        for module in LINEARS:
            name = f"model.layers.{layer}.{module}"
            q, s = found[f"{name}.qweight"], found[f"{name}.scales"].float()
            values = torch.stack([(q >> (4 * place)) & 15 for place in range(8)], 1).flatten(0, 1)  # [K, N]
            weight = (values - 8).float() * s.repeat_interleave(32, 0)
            torch.testing.assert_close(weight.T, nearest(source[f"{name}.weight"].float(), Grid(4, 32, True)))
    assert torch.equal(found["model.embed_tokens.weight"], source["model.embed_tokens.weight"])


def test_awq_scales_leave_the_function_as_it_was(model, text_file, tmp_path):
    """With 8 bits little error is left (and this model doubles it each layer), so norms and weights, both changed, must
    agree: one side alone would leave nothing of the answer."""

    path = tmp_path / "out"
    run(model, path, text_file, **AWQ_8)
    norms = {name: tensor for name, tensor in tensors(path).items() if "layernorm" in name}
    assert any(not torch.equal(tensor, tensors(model)[name]) for name, tensor in norms.items())
    assert deviation(model, copy_with_weights(model, dequantized(path, model), tmp_path / "plain")) < 0.06


AWQ_8 = {"method": "awq", "format": "compressed-tensors", "bits": 8}


def deviation(model, other):
    """Of the logits, as a share, by transformers."""
    from transformers import AutoModelForCausalLM

    ids = torch.randint(0, 256, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted, found = (
            AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32)(ids).logits for p in (model, other)
        )
    return (found - wanted).norm() / wanted.norm()


def test_awq_scales_values_and_their_output_where_each_head_has_its_own(own_heads, text_file, tmp_path):
    """Row c of the values comes out divided by what column c of the output projection is multiplied by, bias included;
    where the rows are left out of it, the answer is another."""
    path = tmp_path / "out"
    run(own_heads, path, text_file, **AWQ_8)
    before, after = tensors(own_heads), dequantized(path, own_heads)
    attention = "model.layers.1.self_attn."
    factors = (after[f"{attention}o_proj.weight"] / before[f"{attention}o_proj.weight"].float()).nanmedian(0).values
    assert factors.max() > 1.5 * factors.min()
    bias = before[f"{attention}v_proj.bias"].float() / factors
    torch.testing.assert_close(after[f"{attention}v_proj.bias"].float(), bias, rtol=0.02, atol=1e-3)
    whole = deviation(own_heads, copy_with_weights(own_heads, after, tmp_path / "plain"))
    assert whole < 0.03
    after |= {name: tensor for name, tensor in before.items() if "v_proj" in name}
    assert deviation(own_heads, copy_with_weights(own_heads, after, tmp_path / "half")) > 3 * whole


def test_norms_keep_elements_that_their_precision_would_not_hold_divided():
    """65504 is float16's largest number, and 2^-24 its least: 30 / 0.0001 and 2^-24 / 64 lie outside."""
    weight = torch.tensor([3.0, 30.0, 2.0**-24, 0.0, -2.0], dtype=torch.float16)
    found, by = divided(weight, torch.tensor([1.5, 1e-4, 64.0, 2.0, 3.0]))
    assert found.tolist() == [2.0, 30.0, 2.0**-24, 0.0, torch.tensor(-2 / 3).half().item()]
    assert by[:4].tolist() == [1.5, 1.0, 1.0, 1.0]
    assert by[4].item() == pytest.approx(-2.0 / found[4].item())


def dequantized(path, model):
    """The checkpoint of compressed-tensors with 8 bits as plain tensors, decoded here."""
    stored, plain = tensors(path), {}
    for name, tensor in tensors(model).items():
        packed = stored.get(f"{name}_packed")
        if packed is None:
            plain[name] = stored[name]
            continue
        base = name.removesuffix(".weight")
        codes = packed.view(torch.uint8).float()
        zeros = stored[f"{base}.weight_zero_point"].T.contiguous().view(torch.uint8).T.float()
        scales = stored[f"{base}.weight_scale"].float()
        size = tensor.shape[1] // scales.shape[1]
        plain[name] = (codes - zeros.repeat_interleave(size, 1)) * scales.repeat_interleave(size, 1)
    return plain


def copy_with_weights(model, weights, path):
    from safetensors.torch import save_file

    shutil.copytree(model, path)
    save_file(
        {name: tensor.contiguous() for name, tensor in weights.items()}, path / "model.safetensors", {"format": "pt"}
    )
    return path


class Killed(BaseException):
    """Passes every handler for ordinary faults, as the end of a process does."""


@pytest.mark.parametrize("method", ["awq", "gptq", "rtn"])
@pytest.mark.parametrize(
    "after", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3, "write"]
)
def test_a_killed_job_carries_on_to_the_same_bytes(model, text_file, tmp_path, monkeypatch, method, after):
    run(model, tmp_path / "whole", text_file, method=method)
    with monkeypatch.context() as patched:
        if after == "write":
            patched.setattr(quantize_job, "copy_beside", kill)
        else:
            real = quantize_job.WorkState.finish_layer

            def finish(self, layer, *more):
                if layer == after:
                    raise Killed
                real(self, layer, *more)

            patched.setattr(quantize_job.WorkState, "finish_layer", finish)
        if after == 3:  # layers are counted from 0: this job ends well
            run(model, tmp_path / "cut", text_file, method=method)
        else:
            with pytest.raises(Killed):
                run(model, tmp_path / "cut", text_file, method=method)
            assert not (tmp_path / "cut" / "config.json").exists()
    lines = run(model, tmp_path / "cut", text_file, method=method)
    expected = {1: "carrying on after 1 of 3", 2: "after 2 of 3", 3: "finished already", "write": "after 3 of 3"}
    assert expected.get(after, "done in") in "\n".join(lines)
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


def kill(*_):
    raise Killed


def test_a_kill_between_the_two_files_of_a_layer(model, text_file, tmp_path, monkeypatch):
    from batchinfer.data.local_storage import LocalStorage

    run(model, tmp_path / "whole", text_file, method="gptq")
    real = LocalStorage.put

    def put(self, name, data):
        if "layer-00001" in name:
            raise Killed
        real(self, name, data)

    with monkeypatch.context() as patched:
        patched.setattr(LocalStorage, "put", put)
        with pytest.raises(Killed):
            run(model, tmp_path / "cut", text_file, method="gptq")
    assert "after 1 of 3" in "\n".join(run(model, tmp_path / "cut", text_file, method="gptq"))
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


def test_other_options_do_not_carry_on(model, text_file, tmp_path):
    run(model, tmp_path / "out", text_file, method="rtn")
    with pytest.raises(UsageError, match=r"begun with bits 4, not 8; give that again, or choose another directory"):
        run(model, tmp_path / "out", text_file, method="rtn", bits=8)
    moved = shutil.copytree(model, tmp_path / "moved")
    assert "finished already" in run(moved, tmp_path / "out", text_file, method="rtn")[-1]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"holds notes.txt already; choose an empty directory"):
        run(model, tmp_path / "full", text_file, method="rtn")


def test_kv_scales_are_the_largest_key_and_value(model, text_file, tmp_path):
    run(model, tmp_path / "out", text_file, method="fp8", kv_cache_scales=True)
    check_kv_scales(tmp_path / "out", model, text_file)
    scheme = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["kv_cache_scheme"]
    assert (scheme["num_bits"], scheme["type"], scheme["strategy"]) == (8, "float", "tensor")


def test_kv_scales_are_of_the_values_as_awq_scaled_them(own_heads, text_file, tmp_path):
    run(own_heads, tmp_path / "out", text_file, **AWQ_8, kv_cache_scales=True)
    plain = copy_with_weights(own_heads, dequantized(tmp_path / "out", own_heads), tmp_path / "plain")
    scales = check_kv_scales(tmp_path / "out", plain, text_file)
    run(own_heads, tmp_path / "fp8", text_file, method="fp8", kv_cache_scales=True)
    unscaled = tensors(tmp_path / "fp8")["model.layers.0.self_attn.v_scale"]
    assert abs(scales[1] - unscaled) > 0.05 * unscaled  # the values have changed, and the scale with them


def check_kv_scales(path, model, text_file):
    """The first layer's scales, which must be those of `model` by transformers."""
    from transformers import AutoModelForCausalLM

    found = tensors(path)
    options = QuantizeOptions(**SMALL, calibration=text_file)
    sequences = read_calibration_text(options, Tokenizer.load(model)).sequences
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    largest = torch.zeros(2)
    for ids in sequences:
        with torch.no_grad():
            cache = reference(torch.from_numpy(ids).long()[None], use_cache=True).past_key_values
        first = cache.layers[0]
        largest = torch.maximum(largest, torch.stack([first.keys.abs().max(), first.values.abs().max()]))
    scales = [float(found[f"model.layers.0.self_attn.{name}_scale"]) for name in "kv"]
    assert scales == pytest.approx((largest / 448).tolist(), rel=0.02)  # bf16 there and in the scale
    return scales


def test_shards_hold_the_same_tensors_as_one_file(model, tmp_path, monkeypatch):
    from batchinfer.conversion import checkpoint_files
    from batchinfer.models.checkpoint import SafetensorsCheckpoint

    run(model, tmp_path / "one", None, method="rtn")
    with monkeypatch.context() as patched:
        write = checkpoint_files.write_weights
        patched.setattr(quantize_job, "write_weights", lambda storage, entries: write(storage, entries, 20_000))
        run(model, tmp_path / "many", None, method="rtn")
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    one = tensors(tmp_path / "one")
    assert len(set(index["weight_map"].values())) > 3
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in one.values())
    many = SafetensorsCheckpoint(tmp_path / "many")
    assert set(many.names) == set(one)
    assert all(torch.equal(many.read(name), tensor) for name, tensor in one.items())


REFUSED = [
    ({"method": "awq", "symmetric": True}, "--format awq --symmetric: .*drop --symmetric, or choose --format gptq"),
    ({"method": "awq", "bits": 3}, "--format awq --bits 3: it holds 4 bits; --format gptq holds 3"),
    ({"method": "awq", "bits": 5}, "no format holds that many"),
    ({"method": "rtn", "bits": 2}, "compressed-tensors --bits 2: it holds 4, 8 bits; --format gptq holds 2"),
    ({"method": "gptq", "format": "awq", "act_order": True}, "--format awq --act-order: .* choose --format gptq"),
    ({"method": "gptq", "format": "compressed-tensors", "act_order": True}, "--format compressed-tensors --act-order"),
    ({"method": "awq", "act_order": True}, "--act-order"),
    ({"method": "fp8", "format": "awq"}, "choose --format compressed-tensors"),
    ({"method": "fp8", "bits": 4}, "fp8 has 8 bits"),
    ({"method": "awq", "kv_cache_scales": True}, "--kv-cache-scales: awq files"),
    ({"method": "gptq", "damp": 0.0}, "--damp 0"),
    (
        {"method": "gptq", "act_order": True, "group_size": -1},
        "--act-order --group-size -1: one group a row has no order",
    ),
    ({"method": "best"}, "--method best: choose one of awq, gptq, awq-gptq, rtn, fp8"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=lambda value: str(value))
def test_combinations_that_cannot_be_written(options, message):
    with pytest.raises(UsageError, match=message):
        QuantizeOptions(**options)


WITHOUT_EFFECT = [
    ({"damp": 0.02}, "--damp: .*only --method gptq and awq-gptq"),
    ({"method": "gptq", "search_tokens": 64}, "--search-tokens: .*only --method awq and awq-gptq"),
    ({"method": "fp8", "group_size": 128}, "--group-size: .*fp8 has a scale a channel; leave it out"),
    (
        {"method": "rtn", "calibration": "a.txt"},
        "--calibration: .*--method rtn reads no text, but for --kv-cache-scales",
    ),
    ({"method": "fp8", "seed": 0}, "--seed: .*--method fp8 reads no text"),
    ({"method": "rtn", "calibration_length": 64}, "--calibration-length: "),
    ({"calibration_column": "text"}, "--calibration-column: .*there is no --calibration file"),
]


@pytest.mark.parametrize(("stated", "message"), WITHOUT_EFFECT, ids=lambda value: str(value))
def test_options_that_would_have_no_effect_are_refused_and_leave_no_record(stated, message):
    with pytest.raises(UsageError, match=message):
        stated_options(**stated, calibration_samples=None, format=None)
    assert not set(QuantizeOptions(**stated).record()) & (set(stated) - {"method"})


def test_stated_options_with_an_effect_are_taken():
    stated = {"method": "fp8", "kv_cache_scales": True, "calibration": "a.txt", "seed": 3, "bits": 8}
    assert stated_options(**stated, damp=None, group_size=None) == QuantizeOptions(**stated)
    assert stated_options(method="awq-gptq", damp=0.1, search_tokens=9).record()["damp"] == 0.1


def test_a_null_quantisation_config_is_none(model, tmp_path):
    """Exporters write it, and it is no reason to refuse the model."""
    shutil.copytree(model, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"quantization_config": None}))
    run(tmp_path / "model", tmp_path / "out", None, method="rtn")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["quantization_config"]["quant_method"] == "compressed-tensors"


def test_windows_beyond_the_positions_are_refused(model, text_file, tmp_path):
    with pytest.raises(UsageError, match="--calibration-length 129: the model has positions for 128 tokens"):
        run(model, tmp_path / "out", text_file, calibration_length=129)
    assert not (tmp_path / "out").exists()
    run(model, tmp_path / "out", None, method="rtn", calibration_length=129)


@pytest.mark.parametrize("method", ["awq", "gptq", "awq-gptq", "fp8"])
def test_numbers_that_are_not_finite_end_it_by_the_layer(model, text_file, tmp_path, method):
    """The first layer's output passes every range, so that the second's input is infinite, or NaN after its norm."""
    weights = tensors(model)
    weights["model.layers.0.mlp.down_proj.weight"] = torch.full((64, 96), 3e38, dtype=torch.bfloat16)
    broken = copy_with_weights(model, weights, tmp_path / "broken")
    what = "its keys or values are" if method == "fp8" else "the inputs of its weights are"
    with pytest.raises(BatchInferError, match=rf"^model\.layers\.1: {what} NaN or infinite on the calibration text"):
        run(broken, tmp_path / "out", text_file, method=method, format="compressed-tensors", kv_cache_scales=True)
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_group_that_does_not_divide_names_those_that_do(model, text_file, tmp_path):
    with pytest.raises(UsageError, match=r"128 does not divide the 64 inputs of self_attn.q_proj; 32 and -1 \("):
        run(model, tmp_path / "out", text_file, group_size=128)
    assert not (tmp_path / "out").exists()
    shapes = {"self_attn.q_proj": (576, 576), "mlp.down_proj": (576, 1536)}
    with pytest.raises(UsageError, match=r"128 does not divide the 576 .*; 32, 64, 96, 192 and -1"):
        QuantizeOptions().check_shapes(shapes)
    with pytest.raises(UsageError, match=r"60 outputs of x fill no whole words .*choose --format compressed-tensors"):
        QuantizeOptions(group_size=32).check_shapes({"x": (60, 64)})


def test_quantised_models_are_refused(model, text_file, tmp_path):
    run(model, tmp_path / "out", text_file, method="rtn")
    with pytest.raises(UsageError, match="quantised already"):
        run(tmp_path / "out", tmp_path / "again", text_file, method="rtn")


def test_memory_in_closed_form():
    """Llama-3-8B's shapes, by hand: 65,536 tokens in batches of 4,096."""
    spec = load_llama_8b()
    gptq = forecast(spec, QuantizeOptions(method="gptq"), 65_536)
    assert gptq.activation_bytes == 2 * 65_536 * (4096 + 14_336)
    assert gptq.batch_bytes == 16 * 4096 * 14_336
    assert gptq.layer_bytes == 4 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14_336)
    assert gptq.working_bytes == 16 * 4096 * 14_336 + 40 * 14_336**2
    assert gptq.writing_bytes == 2 * 128_256 * 4096 + (16 << 20)
    assert gptq.total_bytes == 2_415_919_104 + 939_524_096 + 872_415_232 + 9_160_359_936 + (96 << 20)
    awq = forecast(spec, QuantizeOptions(method="awq"), 65_536)
    assert awq.activation_bytes == 2 * 65_536 * 4096 + 2 * 4096 * (4 * 4096 + 4096 + 14_336)
    moments = 4 * 128 * (3 * 4096 + 14_336) + 12 * 128 * 14_336
    assert awq.working_bytes == 24 * 4096 * 14_336 + moments
    whole_rows = forecast(spec, QuantizeOptions(method="awq", group_size=-1), 65_536)
    moments = 4 * (3 * 4096**2 + 14_336**2) + 12 * 14_336**2
    assert whole_rows.working_bytes == 24 * 4096 * 14_336 + moments
    assert forecast(spec, QuantizeOptions(method="awq-gptq"), 65_536) == gptq
    rtn = forecast(spec, QuantizeOptions(method="rtn"), 0)
    assert rtn.activation_bytes == rtn.batch_bytes == 0
    assert rtn.total_bytes == 4 * 218_103_808 + 16 * 4096 * 14_336 + (96 << 20)


MEASURE = """
import re, sys
from batchinfer.conversion import quantize_job
from batchinfer.conversion.options import QuantizeOptions

def memory(name):
    return 1024 * int(re.search(rf"{name}:\\s+(\\d+)", open("/proc/self/status").read())[1])

def forecast(*given):
    global before, most
    before, most = memory("VmRSS"), real(*given).total_bytes
    return real(*given)

real, quantize_job.forecast = quantize_job.forecast, forecast
options = QuantizeOptions(method=sys.argv[3], group_size=64, search_tokens=1024)
quantize_job.quantize_model(sys.argv[1], sys.argv[2], options, print)
print("PEAK", memory("VmHWM") - before, most)
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["rtn", "awq", "gptq"])
def test_memory_of_a_process_stays_below_the_forecast(smollm2, tmp_path, method):
    """Of a process that has loaded its libraries, on the default model's first layers."""
    import subprocess
    import sys

    from other_tools import cut_model

    model = cut_model(smollm2, tmp_path / "cut")
    command = [sys.executable, "-c", MEASURE, str(model), str(tmp_path / "out"), method]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peak, most = map(int, done.stdout.rpartition("PEAK")[2].split())
    assert most / 3 < peak < most


def load_llama_8b():
    from batchinfer.models.families.registry import parse_config

    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "torch_dtype": "bfloat16",
    }
    return parse_config(config, "config.json")


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".parquet"])
def test_the_same_text_from_each_kind_of_file(model, tmp_path, suffix):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / f"text{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.table({"id": [1, 2], "text": [TEXT, "too short"]}), path)
    else:
        path.write_text(
            TEXT if suffix == ".txt" else json.dumps({"text": TEXT}) + "\n" + json.dumps({"text": None}) + "\n"
        )
    options = QuantizeOptions(calibration=str(path), calibration_length=100, calibration_samples=7)
    text = read_calibration_text(options, Tokenizer.load(model))
    whole = Tokenizer.load(model).encode_batch([TEXT], False)[0].tolist()
    assert len(text.sequences) == 7
    windows = [whole[start : start + 100] for start in range(0, len(whole), 100)]
    assert all(ids.tolist() in windows for ids in text.sequences)


def test_messages_go_through_the_chat_template_and_missing_columns_are_named(model, tmp_path, monkeypatch):
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": TEXT}]}) + "\n")
    options = QuantizeOptions(calibration=str(path), calibration_length=100)
    (model_with_template := tmp_path / "model").mkdir()
    shutil.copytree(model, model_with_template, dirs_exist_ok=True)
    rendered = []
    monkeypatch.setattr(Tokenizer, "apply_chat_template", lambda self, messages: rendered.append(messages) or TEXT)
    text = read_calibration_text(options, Tokenizer.load(model_with_template))
    assert rendered == [[{"role": "user", "content": TEXT}]]
    assert text.num_tokens > 1000
    with pytest.raises(UsageError, match=r"no column 'body'; it has messages: name one with --calibration-column"):
        read_calibration_text(QuantizeOptions(calibration=str(path), calibration_column="body"), Tokenizer.load(model))
    with pytest.raises(UsageError, match=r"--calibration .*no such file"):
        read_calibration_text(QuantizeOptions(calibration=str(tmp_path / "none.parquet")), Tokenizer.load(model))


def test_the_built_in_text_is_as_long_as_help_says(smollm2):
    text = read_calibration_text(QuantizeOptions(), Tokenizer.load(smollm2))
    assert 2500 < text.num_tokens < 3500
    assert text.source == "the built-in text"


def test_the_command(model, text_file, tmp_path, capsys):
    from batchinfer.cli import main as cli

    command = ["quantize", "--model", str(model), "--output", str(tmp_path / "out"), "--group-size", "32"]
    with pytest.raises(SystemExit) as left:
        cli.main([*command, "--method", "gptq", "--calibration", text_file, "--calibration-length", "64"])
    assert left.value.code == 0
    shown = capsys.readouterr().err
    assert "memory at most" in shown
    assert "done in" in shown
    with pytest.raises(SystemExit) as left:
        cli.main([*command, "--symmetric"])
    assert left.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
