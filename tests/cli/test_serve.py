"""`etude serve`: what it prints, what it refuses, and a whole life of it with the real nano."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import httpx2
import pytest

from etude.serve.keys import hash_of


def etude(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "etude.cli.main", "serve", *words], capture_output=True, text=True, timeout=250
    )


def test_a_new_key_is_printed_with_its_hash() -> None:
    found = json.loads(etude("--new-key", "ci", "--json").stdout)
    assert f'hash = "sha256:{hash_of(found["key"])}"' in found["table"]
    assert found["table"].startswith("[keys.ci]")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--host", "0.0.0.0"), "no keys"),
        (("--keys", "missing.toml", "--model", "etude-nano"), "missing.toml"),
        (("-o", "serve.strikt=true"), "strict"),
        (("--model", "./nothing"), "no model at"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(words: Sequence[str], said: str) -> None:
    done = etude(*words)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_server_lives_answers_and_drains(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "etude.cli.main", "serve", "--port", "0", "--json", "--agent"],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
    )  # fmt: skip
    assert process.stdout is not None
    url = json.loads(process.stdout.readline())["url"]
    body = {"model": "etude-nano", "messages": [{"role": "user", "content": "Repair f."}], "max_tokens": 400,
            "temperature": 2, "stream": True}  # fmt: skip
    with httpx2.Client(base_url=url, timeout=300) as client:
        assert client.get("/readyz").json()["version"] == "1.0"
        session = client.post("/v1/agent/sessions", json={"files": {"a.py": "x = 1\n"}}).json()["id"]
        assert "event: end" in client.post(f"/v1/agent/sessions/{session}/messages", json={"text": "go"}).text
        texts: list[str] = []
        asking = threading.Thread(target=lambda: texts.append(client.post("/v1/chat/completions", json=body).text))
        asking.start()
        while "etude_in_flight 1.0" not in client.get("/metrics").text and asking.is_alive():
            pass
        process.send_signal(signal.SIGTERM)
        asking.join()
    assert texts[0].endswith("data: [DONE]\n\n")
    assert process.wait(120) == 0
    process.stdout.close()
