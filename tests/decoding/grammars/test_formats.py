"""Formats of strings against the standard library, and against a reading of the RFCs in words."""

import calendar
import datetime
import ipaddress
import json
import random
import uuid
from collections.abc import Callable

import pytest

from tests.support.structures import compiled, matches


def fits(name: str, text: str) -> bool:
    return matches(
        compiled("json", json.dumps({"type": "string", "format": name})), json.dumps(text, ensure_ascii=False)
    )


def is_valid(read: Callable[[str], object], text: str) -> bool:
    try:
        read(text)
    except ValueError:
        return False
    return True


def test_every_day_of_the_calendar_and_no_other() -> None:
    for year in [*range(1, 10_000, 97), 4, 100, 400, 1900, 2000, 2023, 2024, 2100, 9996, 9999]:
        for month in (0, 1, 2, 4, 12, 13):
            for day in (0, 1, 28, 29, 30, 31, 32):
                text = f"{year:04}-{month:02}-{day:02}"
                assert fits("date", text) == is_valid(datetime.date.fromisoformat, text), text


def test_29_february_of_leap_years_only() -> None:
    for year in range(1, 10_000):
        assert fits("date", f"{year:04}-02-29") == calendar.isleap(year)
    assert not fits("date-time", "2023-02-29T12:00:00Z")


@pytest.mark.parametrize(
    ("text", "fine"),
    [
        ("23:59:60Z", True),
        ("15:59:60-08:00", True),
        ("01:59:60.25+02:00", True),
        ("22:59:60Z", False),
        ("23:59:61Z", False),
        ("15:59:60+08:00", False),
    ],
)
def test_leap_seconds_end_a_day_in_utc(text: str, fine: bool) -> None:
    assert fits("time", text) == fine
    assert fits("date-time", f"1990-12-31T{text}") == fine


def test_times_of_the_day() -> None:
    random_ = random.Random(1)
    for _ in range(2000):
        hour, minute, second = (random_.randrange(top) for top in (26, 62, 60))
        zone = random_.choice(["Z", "+00:00", "-23:59", "+05:30", "+24:00", ""])
        text = f"{hour:02}:{minute:02}:{second:02}{random_.choice(['', '.5', '.123456'])}{zone}"
        fine = zone != "" and is_valid(datetime.time.fromisoformat, text.replace("Z", "+00:00"))
        assert fits("time", text) == fine, text
        assert fits("date-time", f"2024-02-29T{text}") == fine, text


def test_addresses() -> None:
    random_ = random.Random(2)
    for _ in range(4000):
        groups = [
            random_.choice(["0", "1", "ffff", "ABCD", "0001", "g", "12345"][: random_.choice((5, 5, 7))])
            for _ in range(9)
        ]
        words = groups[: random_.randrange(1, 10)]
        if random_.random() < 0.4:
            words[-1] = random_.choice(["1.2.3.4", "255.255.255.255", "1.2.3", "256.1.1.1"])
        text = ":".join(words)
        if random_.random() < 0.7:
            index = random_.randrange(len(words) + 1)
            text = ":".join(words[:index]) + "::" + ":".join(words[index:])
        assert fits("ipv6", text) == is_valid(ipaddress.IPv6Address, text), text
    for _ in range(1000):
        text = ".".join(
            random_.choice(["0", "9", "10", "99", "199", "249", "255", "256", "01", ""])
            for _ in range(random_.choice((3, 4, 4, 5)))
        )
        assert fits("ipv4", text) == is_valid(ipaddress.IPv4Address, text), text


def test_identifiers() -> None:
    random_ = random.Random(3)
    for _ in range(200):
        text = str(uuid.UUID(int=random_.getrandbits(128)))
        assert fits("uuid", text)
        assert fits("uuid", text.upper())
        cut = random_.randrange(len(text))
        assert not fits("uuid", text[:cut] + text[cut + 1 :])


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("ipv6", ["::ffff:1.2.3.4", "::", "1::", "64:ff9b::192.0.2.33"], ["1::2::3", ":1", "::1%eth0", "1.2.3.4"]),
        (
            "duration",
            ["P1Y2M3DT4H5M6S", "P1W", "PT0S", "P1M", "P4DT12H"],
            ["P", "PT", "P1", "P1YT", "P2S", "P1Y2W", "1D"],
        ),
        (
            "email",
            ["a.b+c@d-e.org", '"joe bloggs"@example.com', "a@[127.0.0.1]", "a@[IPv6:::1]", "a@b"],
            ["a", "a@", "@b", "a..b@c", ".a@b", "a.@b", "a b@c", "a@-b", "a@b-", "a@[127.0.0.300]", "a@" + "b" * 64],
        ),
        (
            "hostname",
            ["example.com", "a", "1", "a-b.c", "a" * 63, ".".join(["a" * 63] * 3)],
            ["", "-a", "a-", "a..b", ".a", "a.", "a_b", "a" * 64, ".".join(["a" * 63] * 4), "é"],
        ),
        (
            "uri",
            [
                "http://a.b/c?d=e#f",
                "http://[::ffff:1.2.3.4]:80/",
                "urn:isbn:1",
                "mailto:a@b",
                "file:///x",
                "a:",
                "a://b%20c",
            ],
            [
                "a",
                "/a",
                "//a/b",
                "http:// a",
                "http://a b",
                "a:%2",
                "http://[::1",
                "1a:b",
                "a:<b>",
                "a:#b#c",
                "http://é",
            ],
        ),
    ],
)
def test_texts_by_their_rfc(name: str, right: list[str], wrong: list[str]) -> None:
    assert [text for text in right if not fits(name, text)] == []
    assert [text for text in wrong if fits(name, text)] == []


def test_a_format_beside_a_pattern_and_a_length() -> None:
    schema = {"type": "string", "format": "date", "pattern": "^2024", "maxLength": 10}
    grammar = compiled("json", json.dumps(schema))
    assert [matches(grammar, f'"{text}"') for text in ("2024-02-29", "2023-02-28", "2024-02-30")] == [
        True,
        False,
        False,
    ]
    short = compiled("json", json.dumps({"type": "string", "format": "hostname", "maxLength": 3}))
    assert [matches(short, f'"{text}"') for text in ("a.b", "a.bc")] == [True, False]
