"""Coding agents of others, as they come: how each is started on a folder, and a scripted model that repairs it.

    install-foreign FOLDER installs them; ETUDE_FOREIGN names the folder (default: /tmp/foreign)

The model is scripted behind the Engine protocol: it reads the prompt that the engine was given, finds the program's
own shell among the tools in it, looks, repairs, tries, and says that it is done; ids are Qwen3's. What a program asks
beside that (titles, summaries) is answered with a line of text.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.protocols import GenerateRequest
from serve.speaking import calls, decoded, says

FOREIGN = Path(os.environ.get("ETUDE_FOREIGN", "/tmp/foreign"))
BROKEN = "def clamp(x, low, high):\n    return max(low, max(x, high))\n"
FIXED = "def clamp(x, low, high):\n    return max(low, min(x, high))\n"
PROMPT = "clamp in clamp.py gives wrong values. Repair it, and try it."
SHELLS = ("bash", "Bash", "run_shell_command", "exec_command", "shell_command", "shell", "execute_bash")
STEPS = ("cat clamp.py", "sed -i 's/max(x, high)/min(x, high)/' clamp.py",
         f"{sys.executable} -c 'from clamp import clamp; print(clamp(7, 0, 5))'")  # fmt: skip
AIDER = f"""I repair it.

clamp.py
```python
<<<<<<< SEARCH
{BROKEN}=======
{FIXED}>>>>>>> REPLACE
```
"""


def repair(request: GenerateRequest) -> list[int]:
    """What the model says."""
    prompt = decoded(request.ids)
    shell = next((tool for name in SHELLS for tool in tools_in(prompt) if tool["name"] == name), None)
    if shell is None:
        return says(AIDER if "SEARCH" in prompt else "Repair clamp")
    step = prompt.rpartition(PROMPT)[2].count("<tool_response>")
    if step < len(STEPS):
        return calls(shell["name"], "" if step else "I look.", **arguments(shell, STEPS[step]))
    if "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT" in prompt:
        return calls(shell["name"], **arguments(shell, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"))
    return says("clamp is repaired: clamp(7, 0, 5) is 5.")


def tools_in(prompt: str) -> list[dict[str, Any]]:
    """The tools that the prompt describes, one JSON object a line."""
    within = prompt.partition("<tools>\n")[2].partition("\n</tools>")[0]
    return [json.loads(line)["function"] for line in within.splitlines() if line.startswith("{")]


def arguments(tool: Mapping[str, Any], command: str) -> dict[str, Any]:
    """Of a shell, however it is spelled."""
    parameters = tool["parameters"]
    found: dict[str, Any] = {}
    for name, kind in parameters["properties"].items():
        if name in ("command", "cmd"):
            found[name] = ["bash", "-c", command] if kind.get("type") == "array" else command
        elif name in parameters.get("required", ()):
            found[name] = False if kind.get("type") == "boolean" else "Run a command"
    return found


@dataclass(frozen=True)
class Program:
    """A foreign agent. `command(folder, home, url)` gives its words and variables."""

    name: str
    binary: str
    command: Callable[[Path, Path, str], tuple[Sequence[str], Mapping[str, str]]]
    version: Sequence[str] = ("--version",)

    @property
    def path(self) -> Path:
        return FOREIGN / self.binary

    def run(self, folder: Path, home: Path, url: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
        words, variables = self.command(folder, home, url)
        return subprocess.run(
            [str(self.path), *words], cwd=folder, env=environment(home, variables), capture_output=True, text=True,
            timeout=timeout_s, stdin=subprocess.DEVNULL,
        )  # fmt: skip


def environment(home: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """Nothing of the person's own: another home, no keys."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TERM") if name in os.environ}
    xdg = {f"XDG_{name}_HOME": str(home / name.lower()) for name in ("CONFIG", "DATA", "STATE", "CACHE")}
    return {**kept, "HOME": str(home), "CI": "1", "NO_COLOR": "1", **xdg, **variables}


def mini(folder: Path, home: Path, url: str) -> tuple[Sequence[str], Mapping[str, str]]:
    words = ["-t", PROMPT, "-m", "openai/qwen", "-y", "--exit-immediately", "-o", str(home / "out.json"), "-l", "0"]
    return words, {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": "none", "MSWEA_CONFIGURED": "true",
                   "MSWEA_COST_TRACKING": "ignore_errors", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # fmt: skip


def aider(folder: Path, home: Path, url: str) -> tuple[Sequence[str], Mapping[str, str]]:
    words = ["--model", "openai/qwen", "--edit-format", "diff", "--yes-always", "--no-check-update", "--no-git",
             "--no-show-model-warnings", "--analytics-disable", "--message", PROMPT, "clamp.py"]  # fmt: skip
    return words, {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": "none", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


def claude(folder: Path, home: Path, url: str) -> tuple[Sequence[str], Mapping[str, str]]:
    return ["-p", PROMPT, "--dangerously-skip-permissions", "--model", "qwen"], {
        "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "none", "ANTHROPIC_SMALL_FAST_MODEL": "qwen",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "qwen", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "IS_SANDBOX": "1",
        "DISABLE_AUTOUPDATER": "1",
    }  # fmt: skip


def codex(folder: Path, home: Path, url: str) -> tuple[Sequence[str], Mapping[str, str]]:
    settings = {"model": "qwen", "model_provider": "etude", "model_providers.etude.name": "etude",
                "model_providers.etude.base_url": f"{url}/v1", "model_providers.etude.wire_api": "responses",
                "model_providers.etude.env_key": "ETUDE_KEY"}  # fmt: skip
    words = [word for name, value in settings.items() for word in ("-c", f'{name}="{value}"')]
    return ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", *words, PROMPT], {
        "ETUDE_KEY": "none", "CODEX_HOME": _folder(home / "codex"),
    }  # fmt: skip


def opencode(folder: Path, home: Path, url: str) -> tuple[Sequence[str], Mapping[str, str]]:
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "Etude", "models": {"qwen": {"name": "Qwen"}},
                "options": {"baseURL": f"{url}/v1", "apiKey": "none"}}  # fmt: skip
    config = {
        "$schema": "https://opencode.ai/config.json", "model": "etude/qwen", "small_model": "etude/qwen",
        "share": "disabled", "autoupdate": False, "permission": {"edit": "allow", "bash": "allow"},
        "provider": {"etude": provider},
    }  # fmt: skip
    (folder / "opencode.json").write_text(json.dumps(config))
    return ["run", "--model", "etude/qwen", PROMPT], {"OPENCODE_DISABLE_AUTOUPDATE": "1",
                                                      "OPENCODE_DISABLE_MODELS_FETCH": "1"}  # fmt: skip


def qwen(folder: Path, home: Path, url: str) -> tuple[Sequence[str], Mapping[str, str]]:
    words = ["-p", PROMPT, "--yolo", "--auth-type", "openai"]
    return words, {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": "qwen"}


def pi(folder: Path, home: Path, url: str) -> tuple[Sequence[str], Mapping[str, str]]:
    agent = Path(_folder(home / ".pi" / "agent"))
    provider = {"baseUrl": f"{url}/v1", "apiKey": "none", "api": "openai-completions", "models": [
        {"id": "qwen", "name": "Qwen", "reasoning": False, "input": ["text"], "contextWindow": 200000,
         "maxTokens": 8000, "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0}}]}  # fmt: skip
    (agent / "models.json").write_text(json.dumps({"providers": {"etude": provider}}))
    return ["-p", "--provider", "etude", "--model", "qwen", PROMPT], {"PI_CODING_AGENT_DIR": str(agent)}


def _folder(path: Path) -> str:
    path.mkdir(parents=True, exist_ok=True)
    return str(path)


PROGRAMS = (
    Program("mini-swe-agent", "mini-swe-agent/bin/mini", mini),
    Program("aider", "aider/bin/aider", aider),
    Program("Claude Code", "claude/node_modules/.bin/claude", claude),
    Program("Codex CLI", "codex/node_modules/.bin/codex", codex),
    Program("OpenCode", "opencode/node_modules/.bin/opencode", opencode),
    Program("Qwen Code", "qwen/node_modules/.bin/qwen", qwen),
    Program("pi", "pi/node_modules/.bin/pi", pi),
)
