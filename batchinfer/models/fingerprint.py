"""What a model directory is told apart by, so that a resumed job notices other weights. Called by models/resolve.py."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from batchinfer.models.safetensors_header import read_head

_WHOLE_BYTES = 1 << 29  # files up to this size are read whole
_HEAD_BYTES = 1 << 24  # of a larger one: GGUF keeps the tokenizer and the table of its tensors there
_BLOCK_BYTES = 1 << 18
_STRIDE_BYTES = 1 << 26
_SMALL_BYTES = 1 << 16  # tensors up to this size are read whole: norms, biases, scales of the KV cache
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

    Of a file above 512 MiB count its first 16 MiB, 256 KiB in each 64 MiB, its last bytes, and in safetensors the table
    and each tensor of at most 64 KiB: trained or converted otherwise, large tensors differ everywhere, small ones can
    differ alone, and 140 GB take seconds.
    """
    digest = hashlib.sha256()
    size = path.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    with open(path, "rb", buffering=0) as file:
        spans = [(0, size)] if size <= _WHOLE_BYTES else [*_sample(size), *_small_tensors(path, file)]
        for start, stop in spans:
            for position in range(start, stop, _READ_BYTES):
                file.seek(position)
                digest.update(file.read(min(_READ_BYTES, stop - position)))
    return digest.hexdigest()


def _sample(size: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of what is read of a large file whatever is in it."""
    yield 0, _HEAD_BYTES
    yield from ((start, start + _BLOCK_BYTES) for start in range(_STRIDE_BYTES, size, _STRIDE_BYTES))
    yield size - _BLOCK_BYTES, size


def _small_tensors(path: Path, file: IO[bytes]) -> Iterator[tuple[int, int]]:
    """(start, stop) of a safetensors file's head and small tensors; nothing of a file without a head, which the loader
    refuses."""
    if path.suffix != ".safetensors":
        return
    try:
        head = read_head(file)
    except ValueError:
        return
    yield 0, head.num_bytes
    for start, stop in sorted((place.start, place.stop) for place in head.tensors.values()):
        if stop - start <= _SMALL_BYTES:
            yield start, stop
