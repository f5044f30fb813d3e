"""battery.json is what its script makes."""

from __future__ import annotations

import json
import unicodedata

from runtime.make_battery import BATTERY, battery, document


def test_the_script_makes_the_file() -> None:
    assert BATTERY.read_bytes() == document()
    assert json.loads(document()) == battery()


def test_what_the_battery_has() -> None:
    texts = battery()
    assert len(texts) >= 800
    assert len(set(texts)) == len(texts)
    for has in ("\0", "\r\n", "\u0301", "\U0001f600", "\ufffd", "<|im_start|>", " " * 129, "//\n"):
        assert any(has in text for text in texts), has
    assert any(unicodedata.normalize("NFC", text) != text for text in texts)
    assert any(unicodedata.normalize("NFD", text) != text for text in texts)
    assert max(map(len, texts)) <= 300  # streams begin at every place of each
