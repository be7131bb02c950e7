"""Secrets as they look in real text: made by chance, put into code, logs, settings and prose."""

from __future__ import annotations

import base64
import json
import random
import string
from collections.abc import Callable, Iterator

_ALNUM = string.ascii_letters + string.digits
_SAFE = _ALNUM + "_-"
_NAMES = ("alice", "b.meyer", "jchen42", "Maria", "o_neil", "tanaka-k", "x7r")


def _some(dice: random.Random, letters: str, count: int) -> str:
    return "".join(dice.choices(letters, k=count))


def _jwt(dice: random.Random) -> str:
    parts = ({"alg": "HS256", "typ": "JWT"}, {"sub": _some(dice, string.digits, 9), "exp": dice.randrange(10**9)})
    coded = [base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts]
    return ".".join([*coded, _some(dice, _SAFE, 43)])


def _private_key(dice: random.Random) -> str:
    kind = dice.choice(["RSA ", "EC ", "OPENSSH ", ""])
    body = "\n".join(_some(dice, _ALNUM + "+/", 64) for _ in range(dice.randrange(4, 25)))
    return f"-----BEGIN {kind}PRIVATE KEY-----\n{body}\n{_some(dice, _ALNUM, 22)}==\n-----END {kind}PRIVATE KEY-----"


def _password(dice: random.Random) -> str:
    words = ("Tr0ub4dor", "correct-Horse7", "Winter2024!", "zx9Kq#m2", "P4ss!", "gr33nTea%", "moon$Base9")
    return dice.choice(words) + _some(dice, _ALNUM, dice.randrange(3, 9))


SECRETS: dict[str, Callable[[random.Random], str]] = {
    "anthropic": lambda dice: f"sk-ant-api03-{_some(dice, _SAFE, 93)}AA",
    "openai": lambda dice: f"sk-proj-{_some(dice, _SAFE, 74)}T3BlbkFJ{_some(dice, _SAFE, 74)}",
    "github": lambda dice: dice.choice(
        [f"ghp_{_some(dice, _ALNUM, 36)}", f"github_pat_{_some(dice, _ALNUM, 22)}_{_some(dice, _ALNUM, 59)}"]
    ),
    "aws id": lambda dice: f"AKIA{_some(dice, string.ascii_uppercase + '234567', 16)}",
    "aws secret": lambda dice: _some(dice, _ALNUM + "+/", 40),
    "slack": lambda dice: (
        f"xoxb-{_some(dice, string.digits, 12)}-{_some(dice, string.digits, 12)}-{_some(dice, _ALNUM, 24)}"
    ),
    "jwt": _jwt,
    "private key": _private_key,
    "database url": lambda dice: _password(dice).replace("#", "x").replace("%", "y"),
    "assigned token": lambda dice: _some(dice, string.hexdigits.lower() if dice.random() < 0.4 else _ALNUM, 32),
    "password": _password,
    "mail": lambda dice: (
        f"{dice.choice(_NAMES)}{dice.randrange(99)}@{dice.choice(['acme.io', 'mail.bank.co.uk', 'gmail.com'])}"
    ),
    "home": lambda dice: f"{dice.choice(['/home/', '/Users/'])}{dice.choice(_NAMES)}{dice.randrange(100, 999)}",
}
"""Kind -> one by chance."""

_ANYWHERE = (
    "my key is {} and it does not work", "2024-05-01 12:00:01 ERROR request failed ({})", 'client = Client("{}")',
    "curl -H 'X-Key: {}' https://api.internal/v1", "+    value: '{}'", '{{"output": "saw {} twice\\n", "exit": 0}}',
    "    # TODO remove {} before the release", "E   AssertionError: assert '{}' == ''",
)  # fmt: skip
_AFTER_A_NAME = {
    "aws secret": ("AWS_SECRET_ACCESS_KEY={}", "aws_secret_access_key = {}", '"SecretAccessKey": "{}"',
                   "export AWS_SECRET_ACCESS_KEY='{}'", "-aws_secret_access_key: {}"),
    "database url": ("DATABASE_URL=postgresql://app:{}@db.internal:5432/shop", 'url = "mysql://root:{}@10.0.0.7/x"',
                     "redis://default:{}@cache:6379", "git clone https://bob:{}@git.acme.io/x.git",
                     "mongodb+srv://svc:{}@cluster0.mongodb.net/?retryWrites=true"),
    "assigned token": ("API_TOKEN={}", 'api_key = "{}"', "  secret: {}", '{{"access_token": "{}"}}',
                       "export STRIPE_SECRET='{}'", "Authorization: Bearer {}", "client_secret={}&grant=1"),
    "password": ("DB_PASSWORD={}", 'password = "{}"', "  password: {}", "PGPASSWORD='{}' psql", '{{"passwd": "{}"}}'),
}  # fmt: skip
"""Kinds that only the name before them gives away."""
_AROUND = (
    "def total(items):\n    return sum(item.price for item in items)\n", "The tests fail since this morning.\n",
    "drwxr-xr-x 2 root root 4096 Mai  1 12:00 src\n", "commit 9fceb02d0ae598e95dc970b74767f19372d61af8\n",
    "import os\nfrom pathlib import Path\n", "{'id': 17, 'name': 'widget', 'tags': ['a', 'b']}\n",
)  # fmt: skip


def planted(kind: str, count: int, seed: int = 0) -> Iterator[tuple[str, str]]:
    """Texts with a secret in them, and the secret."""
    dice = random.Random(f"{kind} {seed}")
    for _ in range(count):
        secret = SECRETS[kind](dice)
        line = dice.choice(_AFTER_A_NAME.get(kind, _ANYWHERE)).format(secret)
        before, after = ("".join(dice.choices(_AROUND, k=dice.randrange(4))) for _ in range(2))
        yield f"{before}{line}\n{after}", secret
