"""What is found, what is not, and what is taken for a secret and is none. Figures: docs/sessions.md."""

import dataclasses
import random
import site
import sysconfig
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.frames import encode
from etude.protocols import Message, RepositoryState
from etude.sessions.redact import _patterns, find, redact
from etude.sessions.scrub import TOKENS, scrub_event, scrub_turn
from etude.types import ToolCall, ToolResult
from sessions import made
from sessions.planted import SECRETS, planted

COUNT = 200


def leaks(kind: str, text: str, secret: str) -> bool:
    clean, _ = redact(text)
    body = secret.split("\n")[1] if kind == "private key" else secret
    return body in clean


@pytest.mark.parametrize("kind", SECRETS)
def test_planted_secrets_are_found(kind: str) -> None:
    missed = [text for text, secret in planted(kind, COUNT) if leaks(kind, text, secret)]
    print(f"{kind}: {COUNT - len(missed)} of {COUNT} found")
    assert len(missed) <= COUNT * 0.03, missed[:3]


def test_redacting_twice_changes_nothing() -> None:
    for kind in SECRETS:
        for text, _ in planted(kind, 40):
            once, _ = redact(text)
            assert redact(once) == (once, Counter())


def test_marks_say_what_was_there_and_leave_the_rest_alone() -> None:
    text = 'url = "postgresql://app:Sup3r-s3cret@db/x"  # ask ann.lee@acme.io, see /home/annlee/notes\n'
    clean, found = redact(text)
    assert clean == 'url = "postgresql://app:<secret:password>@db/x"  # ask <mail>, see ~/notes\n'
    assert found == {"<secret:password>": 1, "<mail>": 1, "~": 1}


def test_a_private_key_whose_head_or_end_was_cut_off_is_found() -> None:
    key = next(planted("private key", 1))[1]
    lines = key.split("\n")
    for text in ("\n".join(lines[:-2]), "\n".join(lines[2:]), key.replace("\n", "\\n"), f'"{key}"'):
        clean, found = redact(f"output:\n{text}\n")
        assert found == {"<secret:private-key>": 1}
        assert lines[3] not in clean


ORDINARY = """
password = getpass.getpass("Password: ")
token = request.headers["Authorization"]
def login(user: str, password: str = "password", *, token: Optional[str] = None) -> Session:
self.secret_key = os.environ["SECRET_KEY"]
API_KEY=your-api-key-here
"api_key": "<your key>", "token": "${TOKEN}", "secret": "{{ secret }}"
parser.add_argument("--password-file", default="/etc/app/password.txt")
tokens = tokenizer.encode(text); token_count: 12345678
postgresql://user:password@localhost/test
http://localhost:8080/@scope/package
see https://github.com/acme/shop/commit/9fceb02d0ae598e95dc970b74767f19372d61af8
sha256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
x = q@k.T + weights@values.view(-1)
git clone git@github.com:acme/shop.git
/home/user/project and /home/runner/work/shop
.sk-circle-fade-dot { animation: sk-circle-fade-dot 1.2s }
npm install left-pad@1.3.0 react@latest
key = lambda item: item.price
"""


def test_ordinary_code_is_left_alone() -> None:
    assert redact(ORDINARY) == (ORDINARY, Counter())


def source_files() -> list[Path]:
    """The standard library, and every fifth file of what is installed beside it."""
    library = Path(sysconfig.get_path("stdlib"))
    own = [path for path in library.rglob("*.py") if "site-packages" not in path.parts]
    installed = sorted(path for folder in site.getsitepackages() for path in Path(folder).rglob("*.py"))
    return sorted(own) + installed[::5]


@pytest.mark.slow
def test_false_positives_on_real_source_code_are_rare() -> None:
    texts = [(path, path.read_text(encoding="utf-8", errors="replace")) for path in source_files()]
    size, found, where = sum(len(text) for _, text in texts), Counter(), []
    began = time.process_time()
    for path, text in texts:
        for start, end, mark in find(text):
            found[mark] += 1
            if mark.startswith("<secret"):
                where.append(f"{path.name}: {mark} {text[max(0, start - 40) : end]!r}")
    seconds = time.process_time() - began
    secrets = sum(number for mark, number in found.items() if mark.startswith("<secret"))
    print(f"{len(texts)} files, {size / 1e6:.1f} MB, {size / 1e6 / seconds:.1f} MB/s: {secrets} taken for secrets, "
          f"{secrets / (size / 1e6):.2f} a MB; {found['<mail>']} mail addresses, {found['~']} homes")  # fmt: skip
    print("\n".join(where))
    assert secrets / (size / 1e6) < 1


def test_every_text_of_a_turn_is_covered_and_its_ids_are_dropped() -> None:
    for kind in SECRETS:
        text, secret = next(planted(kind, 1))
        body = secret.split("\n")[1] if kind == "private key" else secret
        call = ToolCall(name="shell", arguments={"command": text, "more": [{"deep": (text,)}], text: 1}, error=text)
        result = Message(role="tool", results=(ToolResult(text=text),))
        where = RepositoryState(root=text, commit="c" * 40, branch=text, patch=f"+{text}")
        for changes in (
            {"messages": (Message(role="user", text=text),)},
            {"messages": (result,)},
            {"messages": (Message(role="assistant", calls=(call,)),)},
            {"reply": made.reply(text)},
            {"reply": made.reply("", call)},
            {"repository": where},
        ):
            turn = made.turn(**{"tokens": made.tokens(), **changes})
            clean, found = scrub_turn(turn, lambda ids: "nothing")
            assert body.encode() not in encode(clean), (kind, changes)
            assert clean.tokens is None
            assert found[TOKENS] == 1
        event, found = scrub_event(made.event(text=text))
        assert body not in event.text
        assert found.total() >= 1


def test_ids_are_kept_only_if_what_they_stand_for_was_read_and_is_clean() -> None:
    text, secret = next(planted("github", 1))
    turn = made.turn(tokens=made.tokens())
    clean, found = scrub_turn(turn, lambda ids: f"{len(ids)} words")
    assert clean is turn
    assert found == {}
    hidden, found = scrub_turn(turn, lambda ids: text)  # as in thinking, which no text of the turn holds
    assert hidden.tokens is None
    assert found == {TOKENS: 1}
    assert secret.encode() not in encode(hidden)
    unread, found = scrub_turn(turn, None)
    assert unread.tokens is None


def test_an_argument_is_judged_by_its_name() -> None:
    call = ToolCall(name="connect", arguments={"password": "moon$Base9xyz", "host": "db"})
    clean, _ = scrub_turn(made.turn(reply=made.reply("", call)), None)
    assert clean.reply.calls[0].arguments == {"password": "<secret:assigned>", "host": "db"}


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=400))
def test_any_text_is_taken(text: str) -> None:
    once, _ = redact(text)
    assert redact(once)[0] == once
    encode(scrub_event(made.event(text=text))[0])


def test_long_lines_and_hostile_texts_take_linear_time() -> None:
    dice = random.Random(1)
    pieces = [
        "a" * 50, "sk-", "eyJ", "password=", "-----BEGIN RSA PRIVATE KEY-----\n", "://a:", "a@a.", "/home/",
        "-----END RSA PRIVATE KEY-----", "".join(dice.choices("abc123+/=", k=500)), "C:\\Users\\",
    ]  # fmt: skip
    for piece in pieces:
        times = []
        for size in (50_000, 200_000):
            text = piece * (size // len(piece))
            began = time.process_time()
            redact(text)
            times.append(time.process_time() - began)
        assert times[1] < 3, (piece[:20], times)


def test_arrays_and_numbers_pass_unchanged() -> None:
    turn = made.turn(tokens=made.tokens())
    assert scrub_turn(turn, lambda ids: "")[0] is turn
    assert isinstance(turn.tokens and turn.tokens.ids, np.ndarray)


_WORDS = ["api", "_", "-", "key", "secret", "token", "pass", "word", "pwd", " = ", ": ", "'", '"', "ab1XY2z8Qk",
          "credentials", "signing", "encryption", "access", "\n", "="]  # fmt: skip


@given(st.lists(st.sampled_from(_WORDS), max_size=14).map("".join))
def test_a_pattern_that_is_looked_for_near_its_hints_alone_finds_what_it_finds_everywhere(text: str) -> None:
    for pattern in (pattern for pattern in _patterns() if pattern.before is not None):
        everywhere = dataclasses.replace(pattern, before=None)
        assert list(pattern.spans(text, text.lower())) == list(everywhere.spans(text, text.lower()))
