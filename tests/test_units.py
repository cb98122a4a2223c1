"""Sizes and durations, parsed and formatted."""

import pytest

from batchinfer.units import format_bytes, format_duration, format_ms, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1048576", 1048576),
        ("24MiB", 24 * 1024 * 1024),
        ("1.5GiB", 1610612736),
        ("1.5 gib", 1610612736),
        ("2GB", 2_000_000_000),
        ("512 kb", 512_000),
        ("1TiB", 1024**4),
        ("9007199254740993", 9007199254740993),
        ("100B", 100),
    ],
)
def test_size(text, count):
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["", "MiB", "24 apples", "-1MiB", "1,5GiB", "1e9", "0x10", "24Mi", "nan"])
def test_not_a_size(text):
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("45", 45),
        ("0.5", 0.5),
        ("45s", 45),
        ("90m", 5400),
        ("2h", 7200),
        ("1h30m", 5400),
        ("1h 30m", 5400),
        ("1d", 86400),
        ("250ms", 0.25),
        ("1.5h", 5400),
    ],
)
def test_duration(text, seconds):
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "h", "5x", "1h5", "5 minutes", "nan", "inf", "1h-5m"])
def test_not_a_duration(text):
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (25165824, "24 MiB"),
        (1610612736, "1.5 GiB"),
        (3 * 1024**4, "3 TiB"),
        (123456789, "118 MiB"),
    ],
)
def test_bytes_for_a_person(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"),
        (0.0042, "4.2 ms"),
        (0.82, "820 ms"),
        (0.9994, "999 ms"),
        (0.9997, "1.0 s"),
        (4.21, "4.2 s"),
        (59.9, "59.9 s"),
        (59.99, "1m 00s"),
        (185, "3m 05s"),
        (3599.6, "1h 00m"),
        (7620, "2h 07m"),
    ],
)
def test_duration_for_a_person(seconds, text):
    assert format_duration(seconds) == text


def test_no_latency_is_a_dash():
    assert format_ms(None) == "-"
    assert format_ms(8.13) == "8.13 ms"
