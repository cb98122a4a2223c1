"""Operations of the model, each with its plain-torch specification and its faster backends.

Imports nothing of batchinfer."""
