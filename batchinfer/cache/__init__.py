"""The paged KV cache: block ids and their bytes, apart."""
