"""Makes battery.json, the texts on which tokenizers are compared: python tests/runtime/make_battery.py

It has sentences in 30 languages and forms of them, code, spaces, emoji, marks that combine, random Unicode, runs of one
character, and texts that look like special tokens.
"""

# ruff: noqa: E501, RUF001

from __future__ import annotations

import json
import random
import unicodedata
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from quantmoe.exporter.writing.battery import texts as texts_of_exports

BATTERY = Path(__file__).with_name("battery.json")
SENTENCES = """\
I can't believe it's already five o'clock, and we've only read 12 of the 340 pages.
Dr. Ann O'Neil paid $1,299.99 (incl. 8.5% tax) on 3/14/2026; wasn't that too much?
Heute früh fuhr ein 14 m langer Lkw über die Brücke; niemand weiß, wie schwer er war.
Die Straßenbahn hält „Am Schloßgarten“, ÖPNV-Linie 3, gegen 17.45 Uhr.
Où est passée la clé ? « Je l'ai laissée chez ma sœur », répondit-elle aujourd'hui.
Le train de 8 h 15 n'arrivera qu'à midi ; c'est déjà l'été, dit-on.
¿Cuánto cuesta el billete de ida y vuelta? Son 23,50 €, señor Núñez.
Mañana lloverá en la sierra, así que llévate el paraguas y las botas.
A reunião começa às nove; não te esqueças de trazer os três relatórios.
Il perché non si sa: città, università e caffè hanno l'accento sull'ultima lettera.
De coördinator zei: 's avonds eten we om zes uur, 's zondags een uur later.
Zażółć gęślą jaźń, powiedział Łukasz, i zamówił dwie gorące herbaty.
V Brně prší už třetí den; řeka Svratka stoupla o dvacet centimetrů.
Árvíztűrő tükörfúrógép: így hangzik a leghíresebb magyar próbaszöveg.
În România, ţăranii şi orăşenii sărbătoresc Paştele în aceeaşi zi; înțelegi?
Isparta'nın gülleri güzeldir; ığdır'da ise kayısı ağaçları çiçek açtı.
Hôm nay trời đẹp quá, chúng ta đi bộ dọc theo bờ sông Hồng nhé!
Ngày 28 tháng 11 năm 2026, giá xăng giảm còn 19.870 đồng mỗi lít.
Сегодня утром на площади собралось около 1500 человек; все ждали ёлку.
Чи їхав хтось із вас до Києва ґанок фарбувати? Ні, м'яч шукали.
Отпред стои стара къща, а зад нея текат две малки реки.
Η θάλασσα σήμερα είναι ήρεμη· πού πας, Γιάννη, με τόση ζέστη;
Ὦ ξεῖν', ἀγγέλλειν Λακεδαιμονίοις ὅτι τῇδε κείμεθα.
שָׁלוֹם לְכֻלָּם, הַיּוֹם נִלְמַד לִקְרֹא סִפּוּר קָצָר.
הרכבת לתל אביב יוצאת בשעה 07:30 מרציף 2, ולא מרציף 4.
القِطُّ الصَّغيرُ نامَ تحتَ الشَّجرةِ، ثمَّ استيقظَ جائعًا.
اشتريت ٣ كيلوغرامات من التفاح بسعر ١٢٫٥ درهمًا في السوق.
می‌خواهم کتاب‌هایم را به کتابخانه بازگردانم؛ ساعت چند است؟
آج بازار میں بہت رش تھا، ہم نے پھل اور سبزیاں خریدیں۔
क्या आप मुझे स्टेशन का रास्ता बता सकते हैं? धन्यवाद, श्रीमान!
राष्ट्रपति ने १५ अगस्त को झंडा फहराया और भाषण दिया।
আজ সকালে বৃষ্টি হয়েছে, তাই রাস্তায় জল জমে আছে।
வணக்கம்! இன்று காலை ஒன்பது மணிக்குப் பள்ளி திறக்கும்.
ఈ రోజు వాతావరణం చాలా బాగుంది, మనం పార్కుకు వెళ్దాం.
ഇന്ന് രാവിലെ മഴ പെയ്തു; കുട്ടികൾ വീട്ടിൽ തന്നെ ഇരുന്നു.
วันนี้อากาศดีมากเราไปเดินเล่นริมแม่น้ำกันเถอะ ราคา ๑๒๐ บาท
ပျော်ရွှင်စရာကောင်းသောနေ့ဖြစ်ပါစေ။
ភាសាខ្មែរមានអក្សរផ្ទាល់ខ្លួន។
བོད་སྐད་ནི་སྐད་ཡིག་རྙིང་པ་ཞིག་ཡིན།
今天下午三点在图书馆开会，请大家准时参加，别忘了带身份证！
這個週末我們去爬山，山頂的風景聽說非常漂亮。
“你吃饭了吗？”他问。“还没有，”她回答，“等你一起吃。”
昨日、友達と一緒に映画を観ました。とても面白かったです！（全１２０分）
ﾊﾝｶｸｶﾀｶﾅと全角カタカナ、ヴァイオリンを弾く。
コンピューターの電源を入れてから、３分ほどお待ちください。
내일 아침 일곱 시에 서울역에서 만나요. 표는 제가 예매할게요!
값이 얼마예요? 닭고기 볶음밥은 8,500원입니다.
გუშინ საღამოს თბილისში ძლიერი წვიმა იყო.
Այսօր եղանակը շատ լավ է, գնանք զբոսնելու։
ሰላም! ዛሬ ጠዋት ወደ ገበያ ሄድኩ።
Habari za asubuhi? Watoto wamekwenda shuleni tangu saa moja.
Hyvää huomenta! Äiti keitti yöllä kahvia, ja öljylamppu paloi.
Þetta er íslenska; ðað má ekki gleyma stafnum þ.
Šiandien šalta, ąžuolai apšerkšniję, o ežeras užšalęs.
ᎣᏏᏲ! ᏙᎯᏧ? ᏣᎳᎩ ᎦᏬᏂᎯᏍᏗ.
ᠮᠣᠩᠭᠣᠯ ᠪᠢᠴᠢᠭ
""".splitlines()
CODE = (
    "import numpy as np\n\n\ndef mean(x: np.ndarray, axis: int | None = None) -> float:\n    return x.sum(axis) / x.shape[0]\n",
    "class Node:\n\t__slots__ = ('left', 'right')\n\n\tdef __init__(self, *args, **kwargs):\n\t\tpass  # nothing yet\n",
    "    if x != y and not (a <= b):\n        print(f\"{x!r:>10} {y:.3f}\")\n    else:\n        raise ValueError('no')\n",
    "template <typename T, int N>\nstruct Array {\n  T data[N];  // N elements\n};\n//\n// end\n",
    "  } while (--n > 0);\n\n  return -1;\n}  // namespace\n#endif\n",
    "fn main() -> Result<(), Box<dyn Error>> {\n    let v: Vec<u8> = vec![0; 16];\n    println!(\"{:?}\", &v[..4]);\n    Ok(())\n}\n",
    "public static void main(String[] args) throws IOException {\r\n  System.out.println(\"a\\tb\");\r\n}\r\n",
    "using var s = new Session(path); // disposed\nvar q = from x in xs where x.Id == 3 select x;\n",
    "const f = async (x) => { await g(x?.y ?? 'z'); };\nexport default f;\n",
    "<!DOCTYPE html>\n<html lang=\"en\"><head><title>A &amp; B</title></head>\n<body onload='go()'></body></html>",
    "SELECT name, COUNT(*) AS n FROM users u\nLEFT JOIN orders o ON o.uid = u.id\nWHERE u.age >= 18 GROUP BY 1 HAVING n > 2;",
    "#!/bin/sh\nset -eu\nfor f in *.txt; do\n  [ -f \"$f\" ] || continue\n  sed -i 's/a\\/b/c/g' \"$f\" && echo \"${f%.txt}\" >> out.log 2>&1\ndone\n",
    "{\n  \"name\": \"demo\",\n  \"version\": \"1.0.0\",\n  \"list\": [1, -2.5e3, true, null, \"\\u00e9\\n\"]\n}\n",
    "name: ci\non: [push]\njobs:\n  test:\n    runs-on: ubuntu-latest\n    steps:\n      - uses: actions/checkout@v4\n",
    "| a | b |\n|---|:-:|\n| 1 | `x` |\n\n* item\n  1. one\n\n> quote\n\n```py\npass\n```\n",
    "\\begin{equation}\n  \\int_0^\\infty e^{-x^2}\\,dx = \\frac{\\sqrt{\\pi}}{2}\n\\end{equation}",
    "package main\n\nimport \"fmt\"\n\nfunc main() {\n\tfmt.Printf(\"%d\\n\", 0x7fff_ffff)\n}\n",
    "Traceback (most recent call last):\n  File \"a.py\", line 3, in <module>\n    1/0\nZeroDivisionError: division by zero\n",
    "diff --git a/x b/x\n@@ -1,3 +1,4 @@\n-old\n+new\n context\n\\ No newline at end of file\n",
    "^(?:[a-z0-9!#$%&'*+/=?^_`{|}~-]+)@(?:\\d{1,3}\\.){3}\\d{1,3}$",
    "mov eax, [ebp-0x10]\nlea\trdi, [rip+.L.str]\n; comment\ncall puts@PLT\n",
    "C:\\Users\\me\\file.txt /usr/local/bin ~/.bashrc ../a/./b file:///etc/hosts",
    "x=1;y=2;;\nif(x==y){z();}//no spaces\n/**/\n*/;\n);\n});\n}));\n",
    "\"\"\"doc\"\"\"\n'''x'''\n# -*- coding: utf-8 -*-\n@decorator\n~x ^ y | z & w << 2 >> 1\n",
)  # fmt: skip
OTHERS = (
    "\U0001f600\U0001f601\U0001f602 \U0001f923", "\U0001f44d\U0001f3fb\U0001f44d\U0001f3fe\U0001f44d\U0001f3ff",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 family", "\U0001f3f3\ufe0f\u200d\U0001f308 \U0001f3f4\u200d\u2620\ufe0f",
    "\U0001f1e9\U0001f1ea\U0001f1eb\U0001f1f7\U0001f1ef\U0001f1f5", "1\ufe0f\u20e32\ufe0f\u20e3#\ufe0f\u20e3",
    "\u2764\u2764\ufe0f\u2764\ufe0e \u2603 \u2605", "\U0001f9d1\u200d\U0001f4bb codes\U0001f680\U0001f680\U0001f680",
    "(\u256f\u00b0\u25a1\u00b0)\u256f\ufe35 \u253b\u2501\u253b", "\u00af\\_(\u30c4)_/\u00af", ":-) ;) :'( <3 xD ^_^",
    "\U0001faf6\U0001faf7 new", "\U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",
    "a\u0300a\u0301a\u0302a\u0303a\u0308a\u030a", "\u0061\u0323\u0302 \u1ead \u00e2\u0323", "o\u0308\u0304 \u022b", "\u0344 \u0308\u0301",
    "\u212b \u2126 \u212a", "\u1100\u1161\u11a8 \uac01 \u1112\u1161\u11ab\u1100\u1173\u11af", "\u0915\u093c \u0958 \u0929", "\u05e9\u05c1 \ufb2a",
    "Z\u0300\u0301\u0302\u0303\u0304\u0305a\u0316\u0317\u0318\u0319l\u0334\u0335g\u0336o\u0337", "\u0301 alone \u0308", "\u0301\u0301\u0301",
    "\ufb00\ufb01\ufb02\ufb03\ufb04 \u0132\u0133 \u01c4\u01c6", "\uff28\uff45\uff4c\uff4c\uff4f\u3000\uff11\uff12\uff13", "\u2460\u2461\u2462 \u2160\u2161\u2162 \u00bc\u00bd\u00be",
    "x\u00b2y\u00b3z\u2074 H\u2082SO\u2084 10\u207b\u2079", "\u222b\u2211\u220f\u221a\u221e\u2248\u2260\u2264\u2265 \u2200x\u2203y", "\U0001d400\U0001d401 \U0001d54f \U0001d4d0",
    "\u0130\u0131 \u1e9e\u00df \u03a3\u03c3\u03c2 \u01c5", "\u200e\u200f\u202a\u202c\u2066\u2069", "\u00adsoft\u00adhyphen", "a\u200bb\u200cc\u200dd\ufeffe",
    "\ufeffbom first", "\u2028\u2029\u0085\u000b\u000c", "\x00", "a\x00b", "\x00\x00\x00", "end\x00", "\x01\x02\x03\x04\x1f\x7f\x80\x9f",
    "\x1b[31mred\x1b[0m", "\ufffd", "a\ufffdb\ufffd", "\ufffd\ufffd", "\ue000\uf8ff\U000f0000\U0010fffd", "\ufdd0\uffff\U0001ffff",
    "\U00020000\U0002a6df\U0003106c", "\U00010330\U00010331 \U00012000 \U00013000", "\u3402\u9fff\ufa0e", "\u2581", "\u2581\u2581", " \u2581a\u2581 b\u2581",
    "\u0120a \u010ab \u0109c \u00c3\u00a9", "##ing @@ </w> <0x41><0xE4><0xB8>", "\u2423 \u00b7 \u30fb", "1234567", "12345678", "999999999999999999",
    "1,234.5 1.234,5 1'234 1_000", "\u0661\u0662\u0663 \u0967\u0968\u0969 \u0e51\u0e52", "0x1F 0b101 0o17 1e-10 .5 5.", "+49 (0)30 123-456", "12:34:56.789 2026-W48",
    "v1.2.3-rc.1+build", "192.168.0.1 ::1 fe80::1%eth0", "a1b2c3 A1B2C3 1a2b", "don't DON'T Don\u2019t I'LL we'Ve", "'s's 's 'S 'll'd 'RE", "''' \"\"\" ``` '",
    "rock 'n' roll ' t 's", "e . g . , ; : ! ?", "wait ... what?! \u2026no\u2014yes\u2013maybe", "a-b_c/d\\e|f~g`h^i", "(a)[b]{c}<d>", "$5 \u00a35 \u20ac5 5\u20ac 5% \u20b95 \u00a55",
    "#tag @user \u00a7 12 \u2116 5 \u00b0C", "https://example.org/\u043f\u0443\u0442\u044c?q=\u4e2d#\u00e9", "UPPERCASE lowercase MixedCase camelCaseXMLHttp", "aB aBC ABc AbC", "\u00c9cole \u00c9COLE \u00e9COLE",
    "\u4e2dA\u6587b1\u56fd", "abc\u4e2d\u6587def\ud55c\uae00ghi", "\u0645\u0631\u062d\u0628\u0627abc123", "word\u0301 word", "\u00a0nbsp\u00a0\u00a0x", "\u3000\u3000indent", "\u2003em\u2009thin\u202fnarrow",
    "s" + "\u017f" + " K" + "\u212a", "\u1680ogham\u180evowel\u205fmath", "\U0001f600\x00\u4e2d\u0301", "   \u0301x", "\n\u0301x", "\t\u4e2d",
)  # fmt: skip
#: what special tokens of real vocabularies look like
TOKENS = (
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|start|>", "<|message|>", "<|channel|>", "<|return|>", "<s>", "</s>", "<unk>", "<pad>", "[INST]", "[/INST]", "<<SYS>>",
    "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<|begin_of_text|>", "<|eot_id|>", "<start_of_turn>", "<bos>",
    "<think>", "</think>", "<tool_call>", "</tool_response>", "<|fim_prefix|>", "<|vision_pad|>", "[CLS]", "[MASK]", "<mask>", "<|reserved_200017|>", "<|python_tag|>", "<\uff5ctool\u2581sep\uff5c>",
)  # fmt: skip
SPACES = ("", " ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", " \n", "\n ", "\t\t", "\u00a0", "\u3000")
#: first and last code points of random texts
RANGES = (
    (0x20, 0x7E), (0xA0, 0x24F), (0x300, 0x36F), (0x370, 0x3FF), (0x400, 0x4FF), (0x530, 0x5FF), (0x600, 0x6FF), (0x900, 0x9FF), (0xB80, 0xD7F), (0xE00, 0xEFF), (0x1100, 0x11FF),
    (0x1E00, 0x1FFF), (0x2000, 0x206F), (0x2100, 0x2BFF), (0x3000, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xF900, 0xFFFD), (0x10000, 0x10FFF), (0x1D400, 0x1D7FF), (0x1F300, 0x1FAFF), (0x20000, 0x2FA1F),
)  # fmt: skip
PIECES = (" ", "  ", "\n", "\n\n", "\t", "\r\n", "word", "Word", "WORD", "1", "12", "1234", "'s", "'", '"', ".", ",", "!", "//", "-", "_", "(", ")", "{", "};", "\u00e9", "e\u0301", "\u4e2d", "\u3042", "\U0001f600",
          "\u3000", "\u00a0", "\u2581", "<", "|", ">", "\x00")  # fmt: skip


def forms(sentence: str) -> Iterator[str]:
    """A sentence and what becomes of it: decomposed, in capitals, with other spaces, cut in the middle."""
    yield sentence
    for other in (unicodedata.normalize("NFD", sentence), unicodedata.normalize("NFC", sentence), sentence.upper()):
        if other != sentence:
            yield other
    words = sentence.split(" ")
    yield " " + "  ".join(words[: len(words) // 2 + 1])
    yield sentence[len(sentence) // 3 :] + "\n"


def lookalikes(token: str) -> Iterator[str]:
    yield token
    yield f"a{token} b {token}\n{token}c"
    yield token[:-1]
    yield token[1:] + token.upper() + token.replace("|", " | ")


def random_texts(seed: int) -> Iterator[str]:
    draw = random.Random(seed)
    for first, last in RANGES:
        for length in (3, 11, 25, 40):
            yield "".join(chr(draw.randrange(first, last + 1)) if draw.random() > 0.15 else " " for _ in range(length))
    for length in range(1, 61):
        ranges = (RANGES[draw.randrange(len(RANGES))] for _ in range(length))
        yield "".join(chr(draw.randrange(first, last + 1)) for first, last in ranges)
    for length in range(2, 102):
        yield "".join(PIECES[draw.randrange(len(PIECES))] for _ in range(length % 50 + 2))


def runs() -> Iterator[str]:
    """One character, or two, again and again."""
    for text, count in product(
        (" ", "\n", "\t", "a", "-", "=", ".", "0", "\u4e2d", "\U0001f600", "ab", "\r\n", " \n", "e\u0301"), (3, 16, 129)
    ):
        yield text * count


def spaces() -> Iterator[str]:
    for before, between in product(SPACES, SPACES[1:]):
        yield f"{before}x{between}y{before}"


def battery() -> list[str]:
    """Return the texts, each once."""
    found = [*texts_of_exports(), *(form for sentence in SENTENCES for form in forms(sentence)), *CODE, *OTHERS]
    found += [text for token in TOKENS for text in lookalikes(token)]
    found += [*spaces(), *runs(), *random_texts(57)]
    return list(dict.fromkeys(found))


def document() -> bytes:
    """Return battery.json: a list of texts, one a line, in ASCII."""
    return (json.dumps(battery(), indent=0) + "\n").encode()


if __name__ == "__main__":
    BATTERY.write_bytes(document())
