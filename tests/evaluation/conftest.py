"""Modules of other rooms' tests: tiny models, tokenizers, the Hugging Face oracle."""

import sys
from pathlib import Path

for room in ("data", "e2e"):
    sys.path.append(str(Path(__file__).parent.parent / room))
