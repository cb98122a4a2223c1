"""What several operations share: number formats of the KV cache."""
