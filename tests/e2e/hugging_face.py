"""Greedy decoding as Hugging Face does it in float32: the oracle of the end-to-end tests."""

from pathlib import Path
from typing import Any

import torch


class HuggingFaceOracle:
    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    @torch.inference_mode()
    def generate(self, prompt: list[int], max_new_tokens: int) -> list[int]:
        """Greedy tokens by `generate`, end-of-sequence ignored."""
        ids = torch.tensor([prompt])
        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            min_new_tokens=max_new_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        return output[0, len(prompt) :].tolist()

    @torch.inference_mode()
    def gaps(self, prompt: list[int], completion: list[int]) -> torch.Tensor:
        """How far each completion token's logit lies below the greatest, given the tokens before it: 0 where greedy
        decoding would have chosen it too. A completion with only zeros is what `generate` returns."""
        ids = torch.tensor([prompt + completion])
        logits = self.model(ids).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(completion)[:, None])[:, 0]
        return logits.max(dim=1).values - chosen
