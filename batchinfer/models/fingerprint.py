"""What a model directory is told apart by, so that a resumed job notices other weights. Called by models/resolve.py."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

_WHOLE_BYTES = 1 << 29  # files up to this size are read whole
_BLOCK_BYTES = 1 << 18
_STRIDE_BYTES = 1 << 26
_READ_BYTES = 1 << 20
_NAMES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt")


def model_fingerprint(directory: Path) -> str:
    """Hex digest over the names and contents of the configuration, tokenizer and weight files; where the directory
    stands and when it was written do not count."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in _NAMES for path in directory.glob(pattern)}):
        digest.update(f"{path.name}\0{file_digest(path)}\n".encode())
    return digest.hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 in hex of a file's size and content.

    Of a file above 512 MiB only 256 KiB in each 64 MiB count, from its head (where safetensors and GGUF have their
    table) to its last bytes: trained or converted otherwise, weights differ everywhere, and 140 GB take seconds.
    """
    digest = hashlib.sha256()
    size = path.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    with open(path, "rb", buffering=0) as file:
        for start, length in _spans(size):
            file.seek(start)
            digest.update(file.read(length))
    return digest.hexdigest()


def _spans(size: int) -> Iterator[tuple[int, int]]:
    """(start, length) of what is read."""
    if size <= _WHOLE_BYTES:
        yield from ((start, _READ_BYTES) for start in range(0, size, _READ_BYTES))
        return
    yield from ((start, _BLOCK_BYTES) for start in range(0, size, _STRIDE_BYTES))
    yield size - _BLOCK_BYTES, _BLOCK_BYTES
