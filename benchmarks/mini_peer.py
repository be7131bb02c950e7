"""mini-swe-agent's side of benchmarks/harness.py: runs in a Python of its own, and waits for rounds.

    PYTHON benchmarks/mini_peer.py URL TASKS.json FD

Make that Python with `python -m venv DIR` and `pip install mini-swe-agent==2.4.6`. Each line on standard input names an
environment, how many episodes at once, and the tasks to play; one line on descriptor FD answers with (task, seconds,
whether the file was repaired and nothing else changed) for each, and the processor seconds of all.

As its own batch runs do it: DefaultAgent with the prompts of its swebench.yaml, the litellm model, a thread an episode.
Trajectories are not written to disk, costs not counted.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ |= {
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}

import yaml
from minisweagent import package_dir
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.extra.bubblewrap import BubblewrapEnvironment
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel


def play(task: dict[str, Any], kind: str, url: str, given: dict[str, Any], variables: dict[str, str]) -> list[Any]:
    start = time.perf_counter()
    if kind == "bubblewrap":
        environment = BubblewrapEnvironment(env=variables)
        folder = environment.working_dir
    else:
        folder = Path(tempfile.mkdtemp())
        environment = LocalEnvironment(env=variables, cwd=str(folder))
    for path, text in task["workspace"].items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    model = LitellmModel(
        model_name="openai/script", model_kwargs={"api_base": url, "api_key": "none", "drop_params": True},
        **{name: given["model"][name] for name in ("observation_template", "format_error_template")},
    )  # fmt: skip
    agent = DefaultAgent(model, environment, **given["agent"])
    ended = agent.run(task["prompt"])
    found = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
    shutil.rmtree(folder)
    seconds = time.perf_counter() - start
    right = {**task["workspace"], task["path"]: task["repaired"]}
    return [task["mark"], seconds, ended["exit_status"] == "Submitted" and found == right]


def spent() -> float:
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def main() -> None:
    url, path, results = sys.argv[1], sys.argv[2], os.fdopen(int(sys.argv[3]), "w")
    work = json.loads(Path(path).read_text())
    given = yaml.safe_load((package_dir / "config" / "benchmarks" / "swebench.yaml").read_text())
    print("ready", file=results, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        before, start = spent(), time.perf_counter()
        with ThreadPoolExecutor(asked["at_once"]) as threads:
            played = list(threads.map(
                lambda number, kind=asked["kind"]: play(work["tasks"][number], kind, url, given, work["variables"]),
                asked["tasks"],
            ))  # fmt: skip
        seconds = time.perf_counter() - start
        print(json.dumps({"episodes": played, "wall_s": seconds, "cpu_s": spent() - before}), file=results, flush=True)


if __name__ == "__main__":
    main()
