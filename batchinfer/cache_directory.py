"""Where batchinfer keeps what it makes once for each user of a machine. Read by models/model_cache and roofline.py."""

import os
from pathlib import Path


def cache_directory() -> Path:
    """BATCHINFER_CACHE, else XDG_CACHE_HOME/batchinfer, else ~/.cache/batchinfer. It need not exist yet."""
    if own := os.environ.get("BATCHINFER_CACHE"):
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache").expanduser().absolute() / "batchinfer"
