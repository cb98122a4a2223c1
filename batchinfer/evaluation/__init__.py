"""What a model or a precision is worth on a text: perplexity, and how far it lies from another."""
