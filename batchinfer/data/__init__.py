"""Shards in, prompts built, parts out, and what survives a crash."""
