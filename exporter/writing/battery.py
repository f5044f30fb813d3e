"""Texts on which an export compares two tokenizers: scripts, spaces, code, marks that combine, special tokens."""

# ruff: noqa: E501, RUF001

from __future__ import annotations

from collections.abc import Iterable

_SENTENCES = (
    "The ferry leaves at 7:45, doesn't it? She'll wait; they've SAID so, and WE'RE late.",
    "Der Fluß überquert die Straße – größer als je zuvor, oder?",
    "À l'aube, l'œuvre du garçon paraîtra où ça l'arrange.",
    "El pingüino comió jalapeños; ¿quién lo vio? ¡Nadie!",
    "O coração não mente, amanhã às três em São João.",
    "Żółta łódź płynie przez gęstą mgłę.",
    "Příliš žluťoučký kůň úpěl ďábelské ódy.",
    "Pijamalı hasta yağız şoföre çabucak güvendi, İstanbul'da ışık.",
    "Tiếng Việt được viết bằng chữ Quốc ngữ.",
    "Съешь ещё этих мягких французских булок, да выпей чаю.",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.",
    "דג סקרן שט בים מאוכזב ולפתע מצא חברה",
    "نص حكيم له سر قاطع وذو شأن عظيم، أليس كذلك؟",
    "यह एक छोटा वाक्य है, जिसमें १२३ अंक हैं।",
    "আমি বাংলায় গান গাই।",
    "தமிழ் ஒரு பழமையான மொழி.",
    "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า",
    "天地玄黄，宇宙洪荒。２０２６年１１月２８日。",
    "いろはにほへと ちりぬるを、ガギグゲゴ。",
    "키스의 고유조건은 입술끼리 만나야 한다.",
    "საქართველო ლამაზი ქვეყანაა.",
)
_OTHERS = (
    "", " ", "\n", "\t", "  ", "a", "  two  spaces,   three,    four ", " before and after ", "\n\n\nthree lines\r\n\r\n",
    "x\ty\t\tz", "1", "12", "1234567890", "3.14159e-10 1,000,000 0xFF 100% $5 €7 #9", "2026-11-28T19:30:00Z",
    "user.name+tag@example.org https://example.org/a?b=c&d=%20#e", "camelCase snake_case kebab-case UPPER iPhone16",
    "I'd've; rock'n'roll; O'Brien's 'tis", "\u201cquoted\u201d \u2018single\u2019 \u00abangled\u00bb \u2026 \u2014",
    "def f(x: int) -> int:\n    return x ** 2  # squared\n\n\nclass A:\n\tpass\n",
    "for (int i = 0; i < n; ++i) {\n  a[i] += b[i] * c;  // sum\n}\n", "#include <vector>\nauto x = y->z(); /* end */\n//\n",
    '{"key": [1, 2.5, null, {"inner": "\\u00e9"}]}', "<p class='x'>&amp; &lt;</p>", "SELECT a FROM t WHERE b <> 'c';",
    "e\u0301 \u00e9 n\u0303 \u00f1 A\u030a \u00c5 \u1e9b\u0323", "\ufb01 \u2460 \u00bd \u2167 \u210c \u33a1 x\u00b2 H\u2082O",
    "zero\u200bwidth\u200djoiner\u2060\ufeff", "a\u00a0b\u2002c\u3000d\u0085e\u2028f\u2029g", "\x00nul \x07bell \x1b[0m \x7f",
    "\U0001f600 \U0001f44d\U0001f3fd \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1eb\U0001f1ee \u2764\ufe0f",
    "\U00020000\U0002a6d6 \U0001d538\U0001d553 \u16a0\u16c7", "Z\u0351\u036b\u0343A\u0334\u0335L\u0320\u0368G\u0336O\u0321",
    "\ufffd \ue000 \uf8ff", "\u2581 \u2581\u2581a \u0120b \u010a", "<0x0A> <unk> [UNK] ## \u258f", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "ababababababababababababababab", "-" * 40, "=" * 33, " " * 30, "\n" * 12, "." * 7 + "?!?!", "\u4e00" * 20,
    "e .g. a , b ! c ? do n't 's 'm", "END.\n\nBEGIN", "\r", "a\r\nb\rc\nd", " \n \n ", "'", "\u0e33\u0e4d\u0e32",
)  # fmt: skip


def texts(tokens: Iterable[str] = ()) -> list[str]:
    """Return the texts.

    Args:
        tokens: special tokens; each stands in two more texts.
    """
    around = [text for token in tokens for text in (f"a {token} b", f"{token}{token}\n{token}c")]
    return [*_SENTENCES, *_OTHERS, *around]
