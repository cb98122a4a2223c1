"""The text that comes with the package, for measuring what models do with text: read by conversion/ and, where a model
is loaded for an 8-bit cache, by executors/."""

from pathlib import Path

BUILT_IN_TEXT = Path(__file__).with_name("calibration.txt")


def built_in_text() -> str:
    return BUILT_IN_TEXT.read_text(encoding="utf-8")
