"""Bytes of keys and values in closed form, for a model's own attention and for what other kinds of the same shape would
take. Pure; called by plan.py."""

from dataclasses import dataclass

from batchinfer.cache.spec import ELEMENT_BYTES, SCALE_BYTES

KV_DTYPES = ("fp32", "bf16", "fp16", "fp8", "fp8_e5m2", "int8")
ATTENTION_KINDS = ("MHA", "GQA", "MQA", "MLA")


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """latent_width: values that MLA keeps of a token in place of keys and values; None where the model has none of its
    own, so that the proportions of DeepSeek-V2 stand in: 4.5 heads, 4 of them compressed and half a one with the
    rotated part (arXiv 2405.04434, section 2.1)."""

    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    latent_width: int | None = None

    @property
    def kind(self) -> str:
        """The model's own, one of ATTENTION_KINDS."""
        if self.latent_width is not None:
            return "MLA"
        if self.num_kv_heads == self.num_q_heads:
            return "MHA"
        return "MQA" if self.num_kv_heads == 1 else "GQA"

    def kv_bytes_per_token(self, kind: str, dtype: str, has_scales: bool = True) -> int:
        """Bytes that one token takes in all layers. kind: one of ATTENTION_KINDS; GQA has the model's own KV heads.
        dtype: one of KV_DTYPES. has_scales: formats of 8 bits keep a float32 scale for each head, beside keys and
        beside values, and MLA one for each latent."""
        scale = SCALE_BYTES if has_scales and ELEMENT_BYTES[dtype] == 1 else 0
        if kind == "MLA":
            width = self.latent_width or 9 * self.head_dim // 2
            return self.num_layers * (width * ELEMENT_BYTES[dtype] + scale)
        heads = {"MHA": self.num_q_heads, "GQA": self.num_kv_heads, "MQA": 1}[kind]
        return 2 * self.num_layers * heads * (self.head_dim * ELEMENT_BYTES[dtype] + scale)
