"""Who may ask: a file of keys, each with its owner and its quota. It holds hashes, never a key.

    format = 1
    [keys.ci]                         # a name for people
    hash = "sha256:9f86d0..."         # `etude serve --new-key` prints a key and this line
    tenant = "acme"
    user = "ci"
    consent = "train"                 # none, keep, train; without it nothing is stored
    retention_days = 90
    requests_per_minute = 600         # 0: no limit, as of the following two
    tokens_per_day = 5_000_000
    concurrent = 16

Keys are long and random, so a plain hash is as good as a slow one. All hashes are compared, each in constant time.
What it does not do: count (quota.py).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from etude.errors import RecipeError
from etude.protocols import Consent, Owner
from etude.types import FORMAT

PREFIX = "etude-"


class Quota(msgspec.Struct, frozen=True, kw_only=True):
    """0: no limit."""

    requests_per_minute: int = 0
    tokens_per_day: int = 0
    """Of prompts and replies, by days of UTC."""
    concurrent: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks."""

    name: str
    """Of the key; empty where nobody is asked for one."""
    owner: Owner
    quota: Quota


class _Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    hash: str
    tenant: str
    user: str
    consent: Consent = Consent.NONE
    retention_days: int | None = None
    requests_per_minute: int = 0
    tokens_per_day: int = 0
    concurrent: int = 0


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: int
    keys: dict[str, _Entry]


class Keys:
    """The keys of a server."""

    def __init__(self, callers: Sequence[tuple[str, Caller]]) -> None:
        """callers: (hash of the key in hex, whose it is)."""
        self._callers = [(digest.encode(), caller) for digest, caller in callers]

    @classmethod
    def load(cls, path: Path) -> Keys:
        """Errors: RecipeError naming what is wrong with the file."""
        try:
            found = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _File)
        except OSError as error:
            raise RecipeError(f"cannot read the keys in {path}", cause=str(error)) from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
            raise RecipeError(f"{path} is no file of keys", cause=str(error), hint="see docs/serve.md") from error
        if found.format != FORMAT:
            raise RecipeError(f"{path}: format = {found.format} is not supported", hint=f"format = {FORMAT}")
        if not found.keys:
            raise RecipeError(f"{path} holds no key", hint="etude serve --new-key prints one")
        return cls([_checked(path, name, entry) for name, entry in found.keys.items()])

    def find(self, key: str) -> Caller | None:
        """Whose key that is."""
        digest = hash_of(key).encode()
        found = None
        for known, caller in self._callers:
            if hmac.compare_digest(known, digest):
                found = caller
        return found


def _checked(path: Path, name: str, entry: _Entry) -> tuple[str, Caller]:
    kind, _, digest = entry.hash.partition(":")
    if kind != "sha256" or len(digest) != 64 or set(digest.lower()) - set("0123456789abcdef"):
        raise RecipeError(f"{path}: the hash of {name} is not sha256:HEX", hint="etude serve --new-key prints one")
    quota = Quota(**{field: getattr(entry, field) for field in Quota.__struct_fields__})
    if min(quota.requests_per_minute, quota.tokens_per_day, quota.concurrent) < 0:
        raise RecipeError(f"{path}: a quota of {name} is negative", hint="0 sets no limit")
    if not entry.tenant or not entry.user:
        raise RecipeError(f"{path}: {name} needs a tenant and a user")
    owner = Owner(
        tenant=entry.tenant, user=entry.user, consent=entry.consent, retention_days=entry.retention_days
    )  # fmt: skip
    return digest.lower(), Caller(name=name, owner=owner, quota=quota)


def hash_of(key: str) -> str:
    """In hex."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


def new_key(name: str, *, tenant: str, user: str) -> tuple[str, str]:
    """A key, and its table for the file."""
    key = PREFIX + secrets.token_urlsafe(32)
    table = (
        f'[keys.{name}]\nhash = "sha256:{hash_of(key)}"\ntenant = "{tenant}"\nuser = "{user}"\n'
        'consent = "none"   # none, keep, train\n'
    )
    return key, table


def local_caller(consent: str) -> Caller:
    """The person at this machine, where there are no keys."""
    return Caller(name="", owner=Owner(tenant="local", user="local", consent=Consent(consent)), quota=Quota())
