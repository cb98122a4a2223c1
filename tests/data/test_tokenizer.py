import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import (
    BOS,
    EOS,
    EURO_START,
    HEADER,
    LLAMA3_TEMPLATE,
    SHIFT,
    VOCAB_SIZE,
    ids_of,
    save_byte_level,
    save_sentencepiece_like,
)
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from batchinfer.data.tokenizer import Tokenizer
from batchinfer.errors import BatchInferError, ErrorCode, RowError, UsageError


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save_byte_level(tmp_path_factory.mktemp("bytes"), chat_template=LLAMA3_TEMPLATE)


@pytest.fixture(scope="module")
def tokenizer(directory):
    return Tokenizer.load(directory)


@pytest.fixture(scope="module")
def spm_directory(tmp_path_factory):
    return save_sentencepiece_like(tmp_path_factory.mktemp("spm"))


def incremental(tokenizer, completion, prompt=()):
    detokenizer = tokenizer.detokenizer(prompt)
    return [detokenizer.add(token_id) for token_id in completion], detokenizer.finish()


def test_ids_and_special_tokens(tokenizer):
    assert (tokenizer.bos_token, tokenizer.bos_token_id, tokenizer.eos_token_id) == ("<|begin|>", BOS, EOS)
    assert tokenizer.vocab_size == VOCAB_SIZE
    first, second = tokenizer.encode_batch(["ab", "é"])
    assert first.dtype == "int32"
    assert first.tolist() == [BOS, SHIFT + 97, SHIFT + 98]
    assert second.tolist() == [BOS, SHIFT + 0xC3, SHIFT + 0xA9]
    assert tokenizer.encode_batch(["a"], add_special_tokens=False)[0].tolist() == [SHIFT + 97]
    assert tokenizer.encode_batch([]) == []


def test_a_text_that_begins_with_bos_gets_no_second_one(tokenizer):
    plain, written, twice, later = tokenizer.encode_batch(["a", "<|begin|>a", "<|begin|><|begin|>a", "a<|begin|>"])
    assert plain.tolist() == written.tolist() == [BOS, SHIFT + 97]
    assert twice.tolist() == [BOS, BOS, SHIFT + 97]
    assert later.tolist() == [BOS, SHIFT + 97, BOS]


def test_batches_larger_than_a_call_keep_their_order(tokenizer, monkeypatch):
    monkeypatch.setattr("batchinfer.data.tokenizer._CHARACTERS_A_CALL", 10)
    texts = ["x" * length for length in (1, 9, 1, 25, 0, 3, 10, 11)]
    assert [ids.tolist() for ids in tokenizer.encode_batch(texts)] == [[BOS, *ids_of(text)] for text in texts]


def test_truncation_and_padding_saved_with_the_tokenizer_are_off(tmp_path):
    save_byte_level(tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    ids = Tokenizer.load(tmp_path).encode_batch(["a", "abcdefghijkl"])
    assert [len(i) for i in ids] == [2, 13]


def test_chat_template_opens_the_assistants_turn_and_has_one_bos(tokenizer):
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert text == "<|begin|><|header|>user\nhi<|end|><|header|>assistant\n"
    templated = tokenizer.encode_batch([text], add_special_tokens=False)[0].tolist()
    assert templated == tokenizer.encode_batch([text])[0].tolist()
    assert templated == [BOS, HEADER, *ids_of("user\nhi"), EOS, HEADER, *ids_of("assistant\n")]


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no system role') }}",
        "{% for i in range(10000000) %}x{% endfor %}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].content + 1 }}",
    ],
)
def test_what_a_chat_template_may_not_do_is_a_row_error(directory, tmp_path, template):
    (tmp_path / "chat.jinja").write_text(template)
    tokenizer = Tokenizer.load(directory, str(tmp_path / "chat.jinja"))
    tokenizer.require_chat_template()
    with pytest.raises(RowError) as caught:
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert caught.value.code == ErrorCode.TEMPLATE_ERROR


def test_chat_template_faults_are_found_up_front(directory, tmp_path):
    with pytest.raises(UsageError, match="no-such"):
        Tokenizer.load(directory, str(tmp_path / "no-such.jinja"))
    (tmp_path / "chat.jinja").write_text("line\n{% for %}")
    with pytest.raises(UsageError, match="line 2"):
        Tokenizer.load(directory, str(tmp_path / "chat.jinja")).require_chat_template()
    save_byte_level(tmp_path / "plain")
    with pytest.raises(UsageError, match="--chat-template"):
        Tokenizer.load(tmp_path / "plain").require_chat_template()


def test_loading_faults_name_the_directory(tmp_path):
    with pytest.raises(BatchInferError, match=str(tmp_path / "absent")):
        Tokenizer.load(tmp_path / "absent")
    save_byte_level(tmp_path)
    good = json.loads((tmp_path / "tokenizer.json").read_text())
    for bad in ("", "{}", json.dumps(good | {"model": {"type": "Unheard"}})):
        (tmp_path / "tokenizer.json").write_text(bad)
        with pytest.raises(BatchInferError, match=f"{tmp_path}: the tokenizer cannot be loaded"):
            Tokenizer.load(tmp_path)


def test_an_unknown_decoder_is_refused(tmp_path):
    save_byte_level(tmp_path)
    backend = Backend(models.BPE(vocab={"a": 0}, merges=[]))
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(BatchInferError, match="WordPiece"):
        Tokenizer.load(tmp_path)


def test_loading_opens_no_socket_and_imports_no_torch(directory):
    code = f"""
import sys
def refuse(event, arguments):
    if event.startswith("socket."):
        raise AssertionError(event)
sys.addaudithook(refuse)
from pathlib import Path
from batchinfer.data.tokenizer import Tokenizer
Tokenizer.load(Path({str(directory)!r})).apply_chat_template([{{"role": "user", "content": "hi"}}])
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_vocabulary_files_without_tokenizer_json_are_converted(tmp_path):
    save_byte_level(tmp_path)
    model = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    (tmp_path / "tokenizer.json").unlink()
    vocab = model["vocab"] | {"ab": VOCAB_SIZE}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    config = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|begin|>", "eos_token": "<|end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode_batch(["abc"])[0].tolist() == [VOCAB_SIZE, SHIFT + 99]
    assert tokenizer.decode([VOCAB_SIZE, SHIFT + 99]) == "abc"


@pytest.mark.parametrize(("tokenizer_class", "after_bos"), [("LlamaTokenizer", "hi"), ("TokenizersBackend", "▁hi")])
def test_the_class_that_the_config_names_decides_as_in_transformers(tmp_path, tokenizer_class, after_bos):
    """LlamaTokenizer puts the space mark at the start of the text only; the file has it after special tokens."""
    save_sentencepiece_like(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": tokenizer_class, "legacy": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    vocab = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    plain, with_bos = Tokenizer.load(tmp_path).encode_batch(["hi", "<s>hi"])
    assert plain.tolist() == [1, vocab["▁hi"]]
    assert with_bos.tolist() == [1, vocab[after_bos]]


# Decoding


def test_special_tokens_and_unknown_ids_leave_no_text(tokenizer):
    assert tokenizer.decode([BOS, *ids_of("a b"), EOS, 10_000]) == "a b"


@pytest.mark.parametrize("text", ["naïve café", "สวัสดี", "👩‍👩‍👧 ok", "a\ufffdb", "\x00\n\t"])
def test_characters_over_several_tokens_never_show_in_part(tokenizer, text):
    ids = ids_of(text)
    pieces, rest = incremental(tokenizer, ids)
    assert "".join(pieces) == text
    assert rest == ""
    ends = [len(text[: position + 1].encode()) - 1 for position in range(len(text))]
    assert [i for i, piece in enumerate(pieces) if piece] == ends


def test_truncated_and_invalid_bytes_become_one_replacement_each(tokenizer):
    euro = ids_of("€")
    assert tokenizer.decode([*ids_of("a"), *euro[:2]]) == "a\ufffd"
    assert incremental(tokenizer, [*ids_of("a"), *euro[:2]]) == (["a", "", ""], "\ufffd")
    assert tokenizer.decode([SHIFT + 0xFF, *ids_of("x")]) == "\ufffdx"
    assert incremental(tokenizer, [SHIFT + 0xE2, *ids_of("x")]) == (["", "\ufffdx"], "")


def test_random_ids_decode_as_the_tokenizers_library_does(tokenizer, directory):
    backend = Backend.from_file(str(directory / "tokenizer.json"))
    generator = random.Random(7)
    for _ in range(500):
        ids = [generator.choice([generator.randrange(VOCAB_SIZE), *ids_of("é€")]) for _ in range(20)]
        pieces, rest = incremental(tokenizer, ids)
        assert "".join(pieces) + rest == tokenizer.decode(ids) == backend.decode(ids, skip_special_tokens=True)


EURO = ids_of("€")


@pytest.mark.parametrize(
    ("prompt", "completion", "text"),
    [
        (ids_of("price "), ids_of("€"), "€"),
        ([*ids_of("price "), *EURO[:2]], [EURO[2], *ids_of("5")], "€5"),
        ([*ids_of("price "), EURO_START], [EURO[2], *ids_of("5")], "€5"),
        ([*ids_of("price "), EURO[0]], [*EURO[1:], *ids_of("5")], "€5"),
        ([*ids_of("price "), *ids_of("😀")[:3]], [ids_of("😀")[3]], "😀"),
        ([*ids_of("price "), EURO_START], ids_of("5"), "5"),
        ([*ids_of("price "), EURO[0]], [EURO[1], *ids_of("5")], "\ufffd5"),
        ([*ids_of("price "), EURO_START], [EOS], ""),
        ([*ids_of("price "), EURO_START], [], ""),
        ([EURO_START], [EURO[2]], "€"),
        ([*ids_of("price "), EURO[2]], ids_of("5"), "5"),
        ([SHIFT + 0xFF], ids_of("5"), "5"),
        ([], ids_of("5"), "5"),
    ],
)
def test_a_completion_holds_nothing_of_its_prompt(tokenizer, prompt, completion, text):
    assert tokenizer.decode(completion, prompt) == text
    pieces, rest = incremental(tokenizer, completion, prompt)
    assert "".join(pieces) + rest == text


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12), st.data())
def test_a_text_cut_anywhere_gives_the_characters_that_the_prompt_lacks(tokenizer, text, data):
    encoded = ids_of(text)
    cut = data.draw(st.integers(0, len(encoded)))
    ends = [len(text[: position + 1].encode()) for position in range(len(text))]
    expected = "".join(character for character, end in zip(text, ends, strict=True) if end > cut)
    assert tokenizer.decode(encoded[cut:], encoded[:cut]) == expected
    pieces, rest = incremental(tokenizer, encoded[cut:], encoded[:cut])
    assert "".join(pieces) + rest == expected


def test_sentencepiece_completion_is_what_transformers_adds_to_the_prompt(spm_directory):
    from transformers import PreTrainedTokenizerFast

    oracle = PreTrainedTokenizerFast.from_pretrained(str(spm_directory))
    tokenizer = Tokenizer.load(spm_directory)
    prompt = tokenizer.encode_batch(["say hi"])[0].tolist()
    assert prompt[0] == 1
    assert prompt[-1] == tokenizer.encode_batch(["hi"])[0][-1]
    completion = [*oracle.encode("hi you", add_special_tokens=False), *oracle.encode("€", add_special_tokens=False), 2]
    whole = oracle.decode([*prompt, *completion], skip_special_tokens=True)
    assert tokenizer.decode(completion, prompt) == whole[len("say hi") :] == " hi you €"
    pieces, rest = incremental(tokenizer, completion, prompt)
    assert "".join(pieces) + rest == " hi you €"


def test_sentencepiece_bytes_are_held_until_the_character_is_whole(spm_directory):
    tokenizer = Tokenizer.load(spm_directory)
    byte = {value: 3 + value for value in range(256)}
    assert incremental(tokenizer, [byte[b] for b in "€".encode()]) == (["", "", "€"], "")
    assert tokenizer.decode([byte[0xE2], byte[0x82], byte[0x41]]) == "\ufffdA"
    assert tokenizer.decode([byte[0xAC]], [byte[0xE2], byte[0x82]]) == "€"


def test_the_path_may_be_relative(directory, monkeypatch):
    monkeypatch.chdir(directory.parent)
    assert Tokenizer.load(Path(directory.name)).decode(ids_of("ok")) == "ok"
