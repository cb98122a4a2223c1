"""Models of the Hugging Face hub: found in its local cache, or downloaded. Called by models/resolve.py; the one module
here that opens a connection."""

import threading
from collections.abc import Callable
from pathlib import Path

from batchinfer.errors import BatchInferError, first_line

# Configuration, tokenizer and safetensors; no pickle and no code. README.md names the licence.
_FILES = (
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
    "model.safetensors.index.json",
    "*.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "README.md",
)
_LEFT_OUT = ("*/*", "consolidated*")  # other formats' folders, and Mistral's second copy of the weights


class HubUnreachable(BatchInferError):
    """No answer from the hub: no network, or HF_HUB_OFFLINE."""


def find_in_hub_cache(model: str) -> Path | None:
    """The snapshot in Hugging Face's own cache, which may be incomplete; opens no connection."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    except HFValidationError as error:
        raise BatchInferError(f"{model} is neither a local path nor a name that the hub allows") from error


def download_from_hub(model: str, report: Callable[[str], None], timeout_s: float) -> Path:
    """Download into Hugging Face's cache. Raises HubUnreachable where the hub does not answer within `timeout_s`, and
    BatchInferError where it refuses the model or the download breaks off."""
    from huggingface_hub import constants, snapshot_download

    if constants.HF_HUB_OFFLINE:
        raise HubUnreachable("not in the local caches, and HF_HUB_OFFLINE forbids asking the hub")
    report(f"looking for {model} on the Hugging Face hub")
    _ask_hub(model, timeout_s)
    report(f"downloading {model} from the Hugging Face hub")
    try:
        return Path(snapshot_download(model, allow_patterns=list(_FILES), ignore_patterns=list(_LEFT_OUT)))
    except Exception as error:  # the client's, its HTTP library's and the system's have no common ancestor
        raise BatchInferError(f"the download of {model} broke off: {first_line(error)}; run again to go on") from error


def _ask_hub(model: str, timeout_s: float) -> None:
    """Does the hub answer, and may we read the model? The question runs in a thread of its own, because looking up a
    name can block for longer than any timeout of the client."""
    answer: list[Exception | None] = []
    thread = threading.Thread(target=lambda: answer.append(_model_info(model, timeout_s)), daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not answer:
        raise HubUnreachable(f"the Hugging Face hub gave no answer within {timeout_s:g} s")
    if (error := answer[0]) is not None:
        raise _explain(model, error) from error


def _model_info(model: str, timeout_s: float) -> Exception | None:
    from huggingface_hub import HfApi

    try:
        HfApi().model_info(model, timeout=timeout_s)
    except Exception as error:  # handed to the asking thread, which tells the kinds apart
        return error
    return None


def _explain(model: str, error: Exception) -> BatchInferError:
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return BatchInferError(f"{model} is gated: accept its terms on its page at the hub, then `hf auth login`")
    if isinstance(error, RepositoryNotFoundError):
        return BatchInferError(f"the hub has no model {model}, or it is private: check the name, or `hf auth login`")
    if isinstance(error, HfHubHTTPError) and error.response is not None and error.response.status_code < 500:
        return BatchInferError(f"the hub refuses {model}: {first_line(error)}")
    return HubUnreachable(f"the Hugging Face hub cannot be reached ({first_line(error)})")
