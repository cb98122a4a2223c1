"""The figures of an evaluation for a person: one line a figure. Called by the command line."""

from collections.abc import Mapping
from typing import Any

from batchinfer.units import format_bytes, format_duration


def evaluation_table(figures: Mapping[str, Any]) -> str:
    """figures: evaluate()'s."""
    lines = {
        "model": _side_line(figures),
        "text": f"{figures['tokens']:,} tokens in {figures['windows']:,} windows of up to {figures['window']}, from "
        f"{figures['texts']:,} texts",
        "perplexity": f"{figures['perplexity']:.4f}",
    }
    if "against" in figures:
        lines |= {
            "against": f"{_side_line(figures['against'])}: perplexity {figures['against_perplexity']:.4f}",
            "KL divergence": f"{figures['kl_divergence']:.6f} nats in the mean, "
            f"p99 {figures['kl_divergence_p99']:.6f}, max {figures['kl_divergence_max']:.6f}",
            "top-1": f"{figures['top1_agreement']:.2%} of the tokens agree",
        }
    if "greedy_agreement_tokens" in figures:
        lines["greedy"] = (
            f"{figures['greedy_agreement_tokens']:.1f} of {figures['greedy_tokens']} tokens in the mean before the "
            f"first difference, over {figures['greedy_prompts']} prompts"
        )
    lines |= {
        "time": f"{format_duration(figures['wall_seconds'])}, {format_duration(figures['scoring_seconds'])} of it for "
        f"scoring, {figures['tokens_per_s']:,.0f} tokens/s",
        "peak memory": format_bytes(figures["peak_memory_bytes"]),
    }
    return "\n".join(f"{name:<15}{text}" for name, text in lines.items())


def _side_line(side: Mapping[str, Any]) -> str:
    activations = "" if side["activation_dtype"] == "auto" else f", {side['activation_dtype']} activations"
    return f"{side['model']} ({side['dtype']}{activations}, {side['kv_cache_dtype']} KV)"
