"""Where cgroups can be made: the real ones of this machine, and made-up trees for layouts that it does not have."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from etude.sandbox import limits

LIMITS = limits.Limits(memory_bytes=64 << 20, pids=9)


def a_machine(root: Path, mounts: str, own: str) -> Path:
    """A /proc/self that tells of these mounts and this group."""
    proc = root / "proc"
    proc.mkdir()
    (proc / "mountinfo").write_text(mounts.replace("ROOT", str(root)))
    (proc / "cgroup").write_text(own)
    return proc


def a_v1_machine(root: Path) -> Path:
    for name in ("memory/app", "pids", "cpu,cpuacct/docker/1"):
        (root / name).mkdir(parents=True)
    return a_machine(
        root,
        "30 20 0:25 / ROOT/memory rw shared:1 - cgroup cgroup rw,memory\n"
        "31 20 0:26 / ROOT/pids rw - cgroup cgroup rw,pids\n"
        "32 20 0:27 /docker ROOT/cpu,cpuacct/docker rw - cgroup cgroup rw,cpu,cpuacct\n"
        "33 20 0:28 / /proc rw - proc proc rw\n",
        "4:memory:/app\n3:pids:/\n2:cpu,cpuacct:/docker/1\n0::/\n",
    )


def test_version_1_groups_are_made_below_the_own_group_of_each_controller(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "_try", lambda groups: groups)  # made-up folders hold no limit files
        found = limits.find(a_v1_machine(tmp_path))
    assert isinstance(found, limits.Cgroups)
    assert found.version == 1
    assert found.parents == {
        "memory": tmp_path / "memory/app",
        "pids": tmp_path / "pids",
        "cpu": tmp_path / "cpu,cpuacct/docker/1",
    }


def test_a_folder_that_takes_no_limits_is_named_as_the_reason(tmp_path: Path) -> None:
    found = limits.find(a_v1_machine(tmp_path))
    assert isinstance(found, str)
    assert f"{tmp_path}/memory/app/etude-{os.getpid()}--1/memory.limit_in_bytes cannot be written" in found
    assert list((tmp_path / "memory/app").iterdir()) == [], "the trial must leave nothing behind"


def a_v2_machine(root: Path, controllers: str, enabled: str) -> Path:
    own = root / "cg/user.slice/etude.scope"
    own.mkdir(parents=True)
    (own / "cgroup.controllers").write_text(controllers)
    (own / "cgroup.subtree_control").write_text(enabled)
    return a_machine(root, "30 20 0:25 / ROOT/cg rw - cgroup2 cgroup2 rw\n", "0::/user.slice/etude.scope\n")


def test_version_2_needs_memory_and_pids_among_the_controllers(tmp_path: Path) -> None:
    found = limits.find(a_v2_machine(tmp_path, "cpu io", ""))
    assert found == f"{tmp_path}/cg/user.slice/etude.scope does not offer the controllers memory and pids"


def test_version_2_switches_the_controllers_on_for_groups_below(tmp_path: Path) -> None:
    proc = a_v2_machine(tmp_path, "cpu io memory pids", "io")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "_try", lambda groups: groups)
        found = limits.find(proc)
    own = tmp_path / "cg/user.slice/etude.scope"
    assert found == limits.Cgroups(version=2, parents=dict.fromkeys(("memory", "pids", "cpu"), own))
    assert (own / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"


def test_a_machine_without_cgroups_says_so(tmp_path: Path) -> None:
    assert (
        limits.find(a_machine(tmp_path, "1 0 0:1 / / rw - ext4 /dev/x rw\n", "")) == "no cgroup file system is mounted"
    )
    assert "cannot tell" in str(limits.find(tmp_path / "nowhere"))


def test_a_real_group_holds_its_process_and_its_limits() -> None:
    found = limits.find()
    if isinstance(found, str):
        pytest.skip(f"cgroups: {found}")
    sleeper = subprocess.Popen(["sleep", "60"])
    group = found.make(77, LIMITS)
    try:
        group.add(sleeper.pid)
        for folder in group.folders:
            assert str(sleeper.pid) in (folder / "cgroup.procs").read_text().split()
        assert not group.remove(), "a group with a process in it cannot go"
    finally:
        sleeper.kill()
        sleeper.wait()
    assert group.remove()
    assert group.remove(), "removing twice is fine"


def test_sweeping_takes_only_groups_of_processes_that_are_gone(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    for name in (f"etude-{dead.pid}-3", f"etude-{os.getpid()}-3", "etude-x-3", "other"):
        (tmp_path / name).mkdir()
    limits.Cgroups(version=1, parents={"memory": tmp_path}).sweep()
    assert {path.name for path in tmp_path.iterdir()} == {f"etude-{os.getpid()}-3", "etude-x-3", "other"}
