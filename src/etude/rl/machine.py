"""What this machine offers a run: findings for `etude doctor`. The sandbox room has its own (sandbox/probe.py).

What it does not do: install or change anything, or load torch.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from dataclasses import dataclass
from importlib import util
from pathlib import Path

import psutil

from etude.models.recipe import SHIPPED
from etude.rl.processes import TCMALLOC

MIN_MEMORY_GB = 3.0
"""Of the quickstart: orchestrator, trainer, engine and sandboxes together."""
MIN_DISK_GB = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineFinding:
    """One fact. `state` is ok, note (works, but less well) or missing."""

    name: str
    state: str
    text: str
    fix: str = ""


def machine_findings() -> list[MachineFinding]:
    """Takes milliseconds; raises nothing."""
    return [_system(), _python(), _cores(), _memory(), _disk(), _torch(), _allocator(), _model()]


def _system() -> MachineFinding:
    text = f"{platform.system()} {platform.machine()}"
    if sys.platform == "linux":
        return MachineFinding(name="system", state="ok", text=text)
    fix = "use Linux, WSL2, or a Linux container or VM on this machine"
    return MachineFinding(name="system", state="missing", text=f"{text} has no Linux namespaces", fix=fix)


def _python() -> MachineFinding:
    return MachineFinding(name="python", state="ok", text=f"{platform.python_version()} at {sys.executable}")


def _cores() -> MachineFinding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores >= 2:
        return MachineFinding(name="cores", state="ok", text=str(cores))
    return MachineFinding(
        name="cores", state="note", text="1: trainer and engine share it", fix="two cores halve the quickstart's time"
    )


def _memory() -> MachineFinding:
    free = psutil.virtual_memory().available / 1e9
    state = "ok" if free >= MIN_MEMORY_GB else "missing"
    return MachineFinding(
        name="memory", state=state, text=f"{free:.1f} GB free", fix="" if state == "ok" else f"free {MIN_MEMORY_GB} GB"
    )


def _disk() -> MachineFinding:
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    state = "ok" if free >= MIN_DISK_GB else "missing"
    fix = "" if state == "ok" else f"free {MIN_DISK_GB} GB, or name another folder with --runs"
    return MachineFinding(name="disk", state=state, text=f"{free:.1f} GB free here", fix=fix)


def _torch() -> MachineFinding:
    if util.find_spec("torch") is not None:
        return MachineFinding(name="torch", state="ok", text="installed")
    return MachineFinding(name="torch", state="missing", text="not installed", fix="make setup")


def _allocator() -> MachineFinding:
    found = next((path for path in TCMALLOC if Path(path).exists()), None)
    if found:
        return MachineFinding(name="tcmalloc", state="ok", text=found)
    fix = "apt install libtcmalloc-minimal4: training is about 1.3 times as fast with it"
    return MachineFinding(name="tcmalloc", state="note", text="not installed", fix=fix)


def _model() -> MachineFinding:
    folder = SHIPPED["etude-nano"]
    if (folder / "model.safetensors").is_file():
        return MachineFinding(name="etude-nano", state="ok", text=str(folder))
    return MachineFinding(name="etude-nano", state="missing", text=f"no weights in {folder}", fix="make nano")
