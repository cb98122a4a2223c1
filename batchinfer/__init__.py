"""batchinfer: offline batch inference for large language models."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchinfer.llm import LLM
    from batchinfer.request import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """Imports LLM and SamplingParams on first use, so that `import batchinfer` stays light."""
    if name == "LLM":
        from batchinfer.llm import LLM

        return LLM
    if name == "SamplingParams":
        from batchinfer.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'batchinfer' has no attribute {name!r}")
