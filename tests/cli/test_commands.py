"""The commands as a stranger types them, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

COMMANDS = ("quickstart", "doctor", "tasks", "pretrain", "sft", "rl", "report", "check", "runs", "weights", "agent",
            "serve")  # fmt: skip


def etude(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "etude.cli.main", *words]
    environment = dict(os.environ) | {"COLUMNS": "100", "TERM": "dumb"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd, env=environment)


def test_help_names_every_command(tmp_path: Path) -> None:
    done = etude("--help", cwd=tmp_path)
    assert done.returncode == 0
    assert all(command in done.stdout for command in COMMANDS)


def test_the_version_is_data_on_stdout(tmp_path: Path) -> None:
    from etude import __version__

    assert etude("--version", cwd=tmp_path).stdout.strip() == __version__


@pytest.mark.parametrize(
    ("words", "named", "hinted"),
    [
        (["rl", "quikstart.toml"], "quikstart.toml", "quickstart.toml"),
        (["rl", "quickstart.toml", "rl.grup_size=4"], "rl.grup_size", "group_size"),
        (["rl", "quickstart.toml", "rl.group_size=four"], "rl.group_size", ""),
        (["rl", "quickstart.toml", "sandbox.kind=docker"], "sandbox.kind", "namespace"),
        (["rl", "quickstart.toml", "eval.every=-1"], "eval.every", "0"),
        (["rl", "quickstart.toml", "reward.length.coef=0.5"], "length", ""),
        (["rl", "quickstart.toml", "group_size"], "group_size", "key.path=value"),
        (["rl", "quickstart.toml", 'agent.tools=["edit_file", "finish"]'], "run_tests", "control"),
        (["rl", "quickstart.toml", "agent.finish_needs_pass=true"], "agent.finish_needs_pass", "control"),
        (["rl", "quickstart.toml", "budget.wall_s=0"], "budget.wall_s", ""),
        (["sft", "nano-sft.toml", "tasks=etude:repair/heldout"], "etude:repair/heldout", "base"),
        (["pretrain", "quickstart.toml"], "stage", "etude rl"),
        (["rl", "quickstart.toml", "--no-such-option"], "no-such-option", ""),
        (["tasks", "show", "etude:repair/trian"], "trian", "train"),
        (["tasks", "show", "nothing"], "nothing", "etude:repair/train"),
    ],
)
def test_a_wrong_word_is_a_usage_error_that_names_it(words: list[str], named: str, hinted: str, tmp_path: Path) -> None:
    done = etude(*words, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert named in done.stderr
    assert hinted in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_another_fine_tuning_is_not_gone_on_with(tmp_path: Path) -> None:
    from etude import config
    from etude.train.pretrain_recipe import SFTRecipe

    (tmp_path / "tuned").mkdir()
    before = config.resolved_text("sft", SFTRecipe(folder="tuned", model="runs/one/model"))
    (tmp_path / "tuned" / "recipe.toml").write_text(before)
    done = etude("sft", "nano-sft.toml", "folder=tuned", "model=runs/other/model", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "tuned was made with another model" in done.stderr
    assert "choose another folder" in done.stderr
    assert (tmp_path / "tuned" / "recipe.toml").read_text() == before


def test_a_store_without_a_version_is_not_sound(tmp_path: Path) -> None:
    done = etude("weights", "verify", f"file://{tmp_path / 'typo'}", cwd=tmp_path)
    assert done.returncode == 1
    assert "it holds no version" in done.stdout


def test_a_run_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    done = etude("check", "ghost", cwd=tmp_path)
    assert done.returncode == 1
    assert "no run 'ghost'" in done.stderr


def test_a_dry_run_prints_the_whole_recipe_and_runs_nothing(tmp_path: Path) -> None:
    done = etude("rl", "quickstart.toml", "rl.group_size=4", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    tree = tomllib.loads(done.stdout)
    assert tree["rl"]["group_size"] == 4
    assert tree["train"]["betas"] == [0.9, 0.999]
    assert list(tmp_path.iterdir()) == []


def test_no_runs_is_an_empty_list(tmp_path: Path) -> None:
    assert json.loads(etude("runs", "list", "--json", cwd=tmp_path).stdout) == []


def test_doctor_names_what_it_found(tmp_path: Path) -> None:
    done = etude("doctor", "--json", cwd=tmp_path)
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert findings["torch"]["state"] == "ok"
    assert any(name.startswith("sandbox: ") for name in findings)
    assert all(finding["fix"] for finding in findings.values() if finding["state"] == "missing")
    assert done.returncode == int(any(finding["state"] == "missing" for finding in findings.values()))
