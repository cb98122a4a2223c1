"""Tiny random Hugging Face models, and a runner that feeds sequences through our decoder in given chunks."""

from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from batchinfer.cache.paged_kv import PagedKVCache

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}


def make_hf_model(model_type: str, **fields):
    """A float32 model with weights that are not near zero, biases and norms included."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(SIZES | fields))
    config.bos_token_id = config.eos_token_id = None
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def save(model, path: Path) -> Path:
    model.save_pretrained(path)
    return path


class Runner:
    """Runs chunks of sequences through a decoder; it allots blocks in a scattered order."""

    def __init__(self, decoder, kv_dtype="auto", block_size=4, num_blocks=256):
        self.decoder = decoder
        self.block_size = block_size
        self.cache = PagedKVCache(decoder.kv_cache_spec(block_size, kv_dtype), num_blocks)
        for layer in range(decoder.spec.num_layers):
            for tensor in (self.cache.key(layer), self.cache.value(layer)):
                tensor.view(torch.uint8).fill_(0xFF)  # NaN in each float format
        self.free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(3)).tolist()
        self.tables = {}

    def step(self, chunks, **options):
        """chunks: (name, all token ids, start, end). Hidden states of each chunk."""
        positions, slots, rows = [], [], []
        for name, _, start, end in chunks:
            table = self.tables.setdefault(name, [])
            while len(table) * self.block_size < end:
                table.append(self.free.pop())
            at = torch.arange(start, end)
            positions.append(at)
            slots.append(torch.tensor(table)[at // self.block_size] * self.block_size + at % self.block_size)
            rows.append(torch.tensor(table))
        q_lens = torch.tensor([end - start for _, _, start, end in chunks])
        batch = SimpleNamespace(
            token_ids=torch.cat([ids[start:end] for _, ids, start, end in chunks]),
            positions=torch.cat(positions),
            slot_mapping=torch.cat(slots),
            block_table=torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).int(),
            cu_seqlens_q=F.pad(q_lens.cumsum(0), (1, 0)).int(),
            seq_lens=torch.tensor([end for _, _, _, end in chunks]).int(),
            stacks=None,
            wanted=None,
        )
        return self.decoder.forward(batch, self.cache, **options).split(q_lens.tolist())

    def logits(self, name, ids, cuts, **options):
        """Logits of a whole sequence computed in chunks that end at `cuts`."""
        parts = [self.step([(name, ids, a, b)], **options)[0] for a, b in zip([0, *cuts], cuts, strict=False)]
        return self.decoder.compute_logits(torch.cat(parts))
