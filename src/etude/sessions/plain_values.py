"""Whether an assigned value looks like a secret or like what a program is written with.

`token = parse_header(line)`, `password: str`, `"secret": "change-me"` are everywhere in code and are no secrets. What a
machine made up has many different characters; what a person made up as a password has at least letters beside digits
or signs.
"""

from __future__ import annotations

import math
import re
from collections import Counter

_PLACEHOLDERS = re.compile(
    r"(?i)(?:[<{$%*.\[(#].*|(?:your|my[-_]|some[-_]|the[-_]|test|fake|dummy|example|sample|change|insert|enter|put|replace).*"
    r"|.*(?:example|placeholder|redacted|change[-_]?me|dummy|xxxx|\*\*\*|\.\.\.|1234567|abcdef).*"
    r"|password\d{0,3}!?|passw(?:or)?d|pass|pw|pwd|secret|token|user|username|none|null|true|false|undefined|foobar|hunter|tiger)"
)
_WORDS = re.compile(r"(?:[A-Za-z]+|\d{1,4}|v\d+)(?:[_.:/+-]+(?:[A-Za-z]+\d{0,3}|\d{1,4}|v\d+))*[_.:/+-]*")
"""Words or small numbers with signs between them: a name, a path, a version, a date."""
_CAMEL = re.compile(r"[a-z]+(?:[A-Z][a-z]+|[A-Z]{2,5}(?![a-z])|\d{1,3})*|(?:[A-Z][a-z]+|\d{1,3})+")
_PIECES = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_HEX = re.compile(r"[0-9a-fA-F]+")
_FILE = re.compile(r".*\.(?:py|js|ts|json|ya?ml|toml|txt|md|html?|css|pem|key|crt|cfg|ini|sh|log)")


def is_placeholder(value: str) -> bool:
    """What stands in documents in place of a secret, or is filled in by a program."""
    return _PLACEHOLDERS.fullmatch(value) is not None or len(set(value)) <= 3


def looks_secret(value: str, *, quoted: bool, is_password: bool = False) -> bool:
    """Of a value without blanks.

    quoted: it is a string in the text; a bare one may be an expression. is_password: people choose these, so that they
    may be short.
    """
    value = value.rstrip(".:!?|&").strip("*_")
    if is_placeholder(value) or "://" in value or value.startswith(("/", "./", "../", "~", "@", "&", "-", "=")):
        return False
    letters, digits = any(c.isalpha() for c in value), any(c.isdigit() for c in value)
    if not letters or _FILE.fullmatch(value):
        return False
    if _WORDS.fullmatch(value) or _CAMEL.fullmatch(value):
        return False
    if _HEX.fullmatch(value):
        return len(value) >= 16 and digits and entropy(value) >= 2.8
    if _is_wordy(value):
        return False
    if is_password:
        signs = any(not c.isalnum() and c not in "_.-/=+:" for c in value)
        return len(value) >= (6 if quoted else 8) and (digits or signs) and entropy(value) >= 2.5
    return len(value) >= 16 and digits and entropy(value) >= 3.5


def _is_wordy(value: str) -> bool:
    """Words beside numbers, as in `Qwen2_5OmniToken2WavConfig`: what chance makes has shorter pieces than that."""
    pieces = _PIECES.findall(value)
    return re.fullmatch(r"[\w.]+", value) is not None and sum(map(len, pieces)) >= 3.5 * max(1, len(pieces))


def entropy(value: str) -> float:
    """Bits a character, of the characters' frequencies (Shannon)."""
    total = len(value)
    return -sum(n / total * math.log2(n / total) for n in Counter(value).values()) if total else 0.0
