"""What must not be stored: secrets, mail addresses and people's home folders, each replaced by a mark.

    text --hints--> patterns worth trying --> spans, each with its kind --> text with <secret:aws>, <mail>, ~

Patterns of single providers are those of detect-secrets and a few of our own; assignments (`password = ...`,
`API_TOKEN=...`) count by the look of their value. A pattern is tried only on a text that holds one of its hints, which
makes most texts cost a few substring searches. Redacting twice changes nothing.

What it does not do: find secrets that look like ordinary words, or names of people elsewhere than in mail addresses
and paths. docs/sessions.md has recall and false positives.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from etude.sessions.plain_values import entropy, is_placeholder, looks_secret

Found = tuple[int, int, str]
"""Start and end in the text, and the mark that replaces it."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A kind of secret. `hints`: one of them (lower case) is in every text that can match."""

    mark: str
    hints: tuple[str, ...]
    expression: re.Pattern[str]
    accept: Callable[[re.Match[str]], bool] = lambda match: True
    before: int | None = None
    """Characters that a match has before its first hint, at most: it is looked for there alone. None: everywhere."""

    def spans(self, text: str, lowered: str) -> Iterator[Found]:
        """lowered: the text in lower case."""
        group = "secret" if "secret" in self.expression.groupindex else 0
        for match in self._matches(text, lowered):
            if self.accept(match):
                yield (*match.span(group), self.mark)

    def _matches(self, text: str, lowered: str) -> Iterator[re.Match[str]]:
        if self.before is None or len(lowered) != len(text):  # some capitals have two small letters
            yield from self.expression.finditer(text)
            return
        at = 0
        for hint in sorted(_places(lowered, self.hints)):
            for start in range(max(at, hint - self.before), hint + 1):
                if match := self.expression.match(text, start):
                    yield match
                    at = max(match.end(), start + 1)
                    break
            else:
                at = max(at, hint + 1)


def redact(text: str) -> tuple[str, Counter[str]]:
    """The text with every find replaced by its mark, and how many finds of each mark there were."""
    found = find(text)
    if not found:
        return text, Counter()
    parts: list[str] = []
    at = 0
    for start, end, mark in found:
        parts += (text[at:start], mark)
        at = end
    parts.append(text[at:])
    return "".join(parts), Counter(mark for _, _, mark in found)


def find(text: str) -> list[Found]:
    """What must go, in order and without overlaps."""
    lowered = text.lower()
    hints = {hint for hint in _hints() if hint in lowered}
    spans: list[Found] = []
    for pattern in _patterns():
        if not hints.isdisjoint(pattern.hints):
            spans += pattern.spans(text, lowered)
    if "private key" in lowered:
        spans += _private_keys(text)
    # of two finds that overlap the one that begins first wins, then the longer
    spans.sort(key=lambda span: (span[0], -span[1]))
    kept: list[Found] = []
    for span in spans:
        if not kept or span[0] >= kept[-1][1]:
            kept.append(span)
        elif span[1] > kept[-1][1]:
            kept[-1] = (kept[-1][0], span[1], kept[-1][2])
    return kept


def _places(text: str, words: Sequence[str]) -> Iterator[int]:
    """Where one of the words begins."""
    for word in words:
        at = text.find(word)
        while at >= 0:
            yield at
            at = text.find(word, at + 1)


def _standing_alone(match: re.Match[str]) -> bool:
    """Not a piece of a longer run of letters and digits, as inside encoded data."""
    start, end = match.span()
    text = match.string
    return not (text[start - 1 : start].isalnum() or text[end : end + 1].isalnum())


def _mixed(match: re.Match[str]) -> bool:
    """Letters of both cases and digits: no name in a style sheet looks so."""
    value = match[0].split("-", 1)[-1]
    return any(c.isdigit() for c in value) and any(c.isupper() for c in value) and any(c.islower() for c in value)


def _is_password(match: re.Match[str]) -> bool:
    return not is_placeholder(match["secret"]) and not match["secret"].isdigit()


_SERVICE_USERS = re.compile(
    "user|username|runner|ubuntu|debian|node|vscode|coder|app|git|linuxbrew|me|you|example|root|agent|public|shared"
    "|jovyan|vagrant|docker|admin|sandbox|workspace|foo|bar|default|guest"
)
"""Homes that name nobody."""
_FILE_ENDING = re.compile("py|js|ts|md|rs|go|rb|sh|so|cc|ps|gz|png|svg|jpg|gif|css|html|json|yaml|toml")
_TLD = re.compile(
    "[a-z]{2}|com|org|net|edu|gov|mil|int|info|biz|name|pro|dev|app|xyz|online|site|tech|cloud|email|company|agency"
    "|software|systems|solutions|digital|studio|design|world|team|group|network"
)
"""A country, or one of the common others: what follows an @ in code is an attribute otherwise."""


def _is_mail(match: re.Match[str]) -> bool:
    host, ending = match["host"].lower(), match["ending"]
    if match["local"].lower() in ("git", "hg", "svn", "noreply", "no-reply") or _FILE_ENDING.fullmatch(ending):
        return False
    if not _TLD.fullmatch(ending):
        return False
    if re.search(r"(?:^|\.)(?:example|test|invalid|localhost)(?:\.|$)", host) or host.startswith("users.noreply."):
        return False
    after = match.string[match.end() : match.end() + 1]
    return after not in ("(", "[", ":", "/") or (after == ":" and match.string[match.end() + 1 :][:1].isspace())


def _is_person(match: re.Match[str]) -> bool:
    return _SERVICE_USERS.fullmatch(match["who"].lower().rstrip(".")) is None


def _own() -> list[Pattern]:
    def secret(kind: str, hints: str, expression: str, accept: Callable[[re.Match[str]], bool] = _standing_alone,
               flags: int = 0, before: int | None = None) -> Pattern:  # fmt: skip
        return Pattern(f"<secret:{kind}>", tuple(hints.split()), re.compile(expression, flags), accept, before)

    keyword = (
        r"(?:api[_-]?key|access[_-]?key|auth[_-]?key|account[_-]?key|secret|token|passwd|passwords?|passphrase|pwd"
        r"|credentials?|signing[_-]?key|encryption[_-]?key)"
    )
    return [
        secret("anthropic", "sk-ant-", r"sk-ant-[A-Za-z0-9_-]{16,250}"),
        secret("openai", "sk-", r"(?<![\w-])sk-[A-Za-z0-9_-]{32,250}", _mixed),
        secret("github", "github_pat_ ghp_ gho_ ghu_ ghs_ ghr_",
               r"(?:github_pat_[A-Za-z0-9_]{36,255}|gh[pousr]_[A-Za-z0-9]{36,255})"),
        secret("google", "aiza gocspx- ya29.",
               r"(?:AIza[0-9A-Za-z_-]{35}|GOCSPX-[0-9A-Za-z_-]{20,60}|ya29\.[0-9A-Za-z_-]{20,500})"),
        secret("huggingface", "hf_", r"(?<!\w)hf_[A-Za-z]{30,60}"),
        secret("slack", "xox xapp-", r"(?:xox[abeoprs]-[A-Za-z0-9-]{10,250}|xapp-\d-[A-Za-z0-9-]{10,250})"),
        secret("slack", "hooks.slack.com", r"(?<![\w.])hooks\.slack\.com/services/(?P<secret>[A-Za-z0-9/]{20,100})",
               lambda match: True),
        secret("jwt", "eyj", r"(?<![\w-])eyJ[A-Za-z0-9_-]{8,4000}\.eyJ[A-Za-z0-9_-]{8,8000}\.[A-Za-z0-9_-]{0,2000}",
               lambda match: True),
        secret("aws", "secret_access_key secretaccesskey session_token aws",
               r"(?:secret_?access_?key|aws_?secret|session_?token)[\"']?\s{0,8}[:=]\s{0,8}[\"']?"
               r"(?P<secret>[A-Za-z0-9/+=]{40,2000})(?![A-Za-z0-9/+=])", lambda match: True, re.IGNORECASE),
        secret("password", "://",
               r"\b[a-zA-Z][a-zA-Z0-9+.-]{1,30}://[^\s:/@'\"<>`\\]{0,100}:(?P<secret>[^\s/@'\"<>`\\]{1,200})@(?=[\w\[])",
               _is_password),
        secret("bearer", "bearer authorization",
               r"(?:bearer\s{1,4}|authorization[\"']?\s{0,4}[:=]\s{0,4}[\"']?(?:basic|token)\s{1,4})"
               r"(?P<secret>[A-Za-z0-9._~+/=-]{16,4000})", lambda match: looks_secret(match["secret"], quoted=True),
               re.IGNORECASE),
        secret("assigned", "key secret token pass pwd credential",
               keyword + r"(?:[_-]?\w{0,20})?[\"'\]]{0,2}[ \t]{0,8}(?P<sign>:=|=>|=(?!=)|:)[ \t]{0,8}"
               r"(?P<quote>(?<![\w])[rbuf]{0,2}[\"'`]|\\?\")?(?P<secret>[^\s\"'`,;<>(){}\[\]\\]{6,400})",
               _is_assigned, re.IGNORECASE, before=len("encryption_")),
        Pattern("<mail>", ("@",), re.compile(
            r"(?<![\w.+/-])(?P<local>[A-Za-z0-9][A-Za-z0-9_.+-]{0,63})@"
            r"(?P<host>(?:[A-Za-z0-9-]{1,63}\.){1,6}(?P<ending>[A-Za-z]{2,20}))(?![\w-])"), _is_mail),
        Pattern("~", ("/home/", "/users/"), re.compile(
            r"(?<![\w.~])(?:/home|/Users)/(?P<who>[A-Za-z0-9][\w.-]{0,63})"), _is_person),
        Pattern("~", ("-users-", "-home-"), re.compile(
            r"(?<=/)-(?:home|Users)-(?P<who>[A-Za-z0-9]{1,63})(?=-)"), _is_person),
        Pattern("~", ("users\\",), re.compile(
            r"(?<![A-Za-z])[A-Za-z]:\\{1,4}[Uu]sers\\{1,4}(?P<who>[^\\\s\"':<>|/]{1,63})"), _is_person),
    ]  # fmt: skip


def _is_assigned(match: re.Match[str]) -> bool:
    value = match["secret"]
    if match.string.startswith("://", match.end("secret") - 1) or "://" in value or match["quote"] == "f":
        return False
    after = match.string[match.end("secret") : match.end("secret") + 1]
    if not match["quote"] and after and after in "([{":
        return False  # a call or an index, not a value
    is_word = re.match(r"(?i)pass|pwd", match[0]) is not None
    return looks_secret(value, quoted=bool(match["quote"]), is_password=is_word)


_PROVIDERS: tuple[tuple[str, str, str], ...] = (
    # a class of detect-secrets, its kind here, hints
    ("AWSKeyDetector", "aws", "akia asia abia acca a3t aws"),
    ("AzureStorageKeyDetector", "azure", "accountkey="),
    ("DiscordBotTokenDetector", "discord", "."),
    ("GitHubTokenDetector", "github", "ghp_ gho_ ghu_ ghs_ ghr_"),
    (
        "GitLabTokenDetector",
        "gitlab",
        "glpat- gldt- glft- glsoat- glrt- gr1348941 glcbt- glimt- glptt- glagent- gloas-",
    ),
    ("MailchimpDetector", "mailchimp", "-us"),
    ("NpmDetector", "npm", ":_authtoken="),
    ("OpenAIDetector", "openai", "t3blbkfj"),
    ("PypiTokenDetector", "pypi", "pypi-ag"),
    ("SendGridDetector", "sendgrid", "sg."),
    ("SlackDetector", "slack", "xox"),
    ("SquareOAuthDetector", "square", "sq0csp-"),
    ("StripeDetector", "stripe", "k_live_"),
    ("TelegramBotTokenDetector", "telegram", ":"),
    ("TwilioKeyDetector", "twilio", "ac sk"),
)


@functools.cache
def _patterns() -> tuple[Pattern, ...]:
    from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class

    detectors: list[Any] = list(get_mapping_from_secret_type_to_class().values())
    classes = {detector.__name__: detector for detector in detectors}
    found = _own()
    for name, kind, hints in _PROVIDERS:
        for expression in classes[name].denylist:
            found.append(Pattern(f"<secret:{kind}>", tuple(hints.split()), _named(expression), _provider_accepts(name)))
    return tuple(found)


@functools.cache
def _hints() -> tuple[str, ...]:
    return tuple(sorted({hint for pattern in _patterns() for hint in pattern.hints}))


def _named(expression: re.Pattern[str]) -> re.Pattern[str]:
    """With the secret itself in a group of that name, where the pattern has one group around it."""
    if expression.groups == 1 and "([0-9a-zA-Z/+]{40})" in expression.pattern:
        text = expression.pattern.replace("([0-9a-zA-Z/+]{40})", "(?P<secret>[0-9a-zA-Z/+]{40})")
        return re.compile(text, expression.flags)
    return expression


def _provider_accepts(name: str) -> Callable[[re.Match[str]], bool]:
    if name in ("TwilioKeyDetector", "MailchimpDetector", "DiscordBotTokenDetector", "TelegramBotTokenDetector"):
        return lambda match: _standing_alone(match) and entropy(match[0]) > 3.2
    if name == "AWSKeyDetector":
        return lambda match: "secret" in match.re.groupindex or _standing_alone(match)
    return lambda match: True


# Private keys: blocks of lines, also where a tool's answer cut off their head or their end

_BEGIN = re.compile(r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----")
_END = re.compile(r"-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----")
_MAX_KEY = 20_000
"""Characters; no key is longer."""
_BODY = re.compile(r"[A-Za-z0-9+/=\s\\:,\"'+.-]*")
_CODED = re.compile(r"[A-Za-z0-9+/=]{24,}")
_KEY_LINE = re.compile(r"[\s\"'+\\nr]*[A-Za-z0-9+/=]{16,}[\s\"'+\\nr]*")


def _private_keys(text: str) -> Iterator[Found]:
    ends = [match.span() for match in _END.finditer(text)]
    used: set[int] = set()
    stop = 0
    for begin in _BEGIN.finditer(text):
        if begin.start() < stop:
            continue  # inside the one before
        closing = next(((a, b) for a, b in ends if begin.end() <= a < begin.end() + _MAX_KEY), None)
        if closing is None:
            body = _BODY.match(text, begin.end(), begin.end() + _MAX_KEY)
            stop = body.end() if body else begin.end()
        else:
            stop = closing[1]
        if _CODED.search(text, begin.end(), stop):  # a library's constant has no key in it
            yield begin.start(), stop, "<secret:private-key>"
            used.update(() if closing is None else (closing[0],))
    for start, end in ends:
        if start not in used and (head := _start_of_body(text, start)) < start:
            yield head, end, "<secret:private-key>"


def _start_of_body(text: str, end: int) -> int:
    """Where the lines of coded data that stand before `end` begin."""
    lines: Sequence[str] = text[max(0, end - _MAX_KEY) : end].splitlines(keepends=True)
    at = end
    for line in reversed(lines):
        if line.strip() and not _KEY_LINE.fullmatch(line):
            break
        at -= len(line)
    return at
