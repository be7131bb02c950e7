"""The sandbox's tests once more, as a user who is not root: no cgroups, no rights, another home."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEEDED = ("_pytest", "iniconfig", "msgspec", "numpy", "numpy.libs", "packaging", "pluggy", "py.py", "pygments",
          "pyseccomp.py", "pytest", "pytest_timeout.py")  # fmt: skip
TESTS = ("test_namespace.py", "test_namespace_isolation.py", "test_namespace_limits.py", "test_namespace_files.py",
         "test_pool.py", "test_attacks.py")  # fmt: skip


@pytest.fixture
def user() -> Iterator[str]:
    if os.geteuid() != 0:
        pytest.skip("this is an ordinary user already")
    name = f"etude-test-{os.getpid()}"
    made = subprocess.run(["useradd", "--no-create-home", "--shell", "/bin/sh", name], capture_output=True, text=True)
    if made.returncode != 0:
        pytest.skip(f"no user can be made: {made.stderr}")
    yield name
    subprocess.run(["userdel", name], check=True, capture_output=True)


@pytest.fixture
def python() -> str:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    for path in (sys._base_executable, f"/usr/bin/python{version}", f"/usr/local/bin/python{version}"):  # type: ignore[attr-defined]
        if Path(path).exists() and is_public(Path(path).resolve()):
            return path
    pytest.skip(f"there is no Python {version} that other users can run")


def is_public(path: Path) -> bool:
    ways = all(folder.stat().st_mode & stat.S_IXOTH for folder in path.parents)
    return ways and bool(path.stat().st_mode & stat.S_IROTH)


def copy_to(public: Path) -> None:
    """What the tests need, where every user can read it."""
    site = Path(sysconfig.get_path("purelib"))
    (public / "site").mkdir(parents=True)
    ignore = shutil.ignore_patterns("__pycache__", "etude_nano", "*.pyi")
    for name in NEEDED:
        if (site / name).is_dir():
            shutil.copytree(site / name, public / "site" / name, ignore=ignore)
        elif (site / name).exists():
            shutil.copy(site / name, public / "site")
    shutil.copytree(ROOT / "src" / "etude", public / "site" / "etude", ignore=ignore)
    shutil.copytree(ROOT / "tests" / "sandbox", public / "tests" / "sandbox", ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", public)


@pytest.mark.slow
def test_everything_holds_for_an_ordinary_user(user: str, python: str) -> None:
    public = Path("/var/tmp") / user
    path = f"{public}/site:{public}/tests"
    try:
        copy_to(public)
        subprocess.run(["chown", "-R", user, str(public)], check=True)
        command = ["runuser", "-u", user, "--", "env", "-i", f"PYTHONPATH={path}", f"HOME={public}/home",
                   "PATH=/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE=1", python, "-m", "pytest", "-x", "--timeout=300",
                   "-p", "pytest_timeout", f"--basetemp={public}/tmp",
                   *(f"tests/sandbox/{name}" for name in TESTS)]  # fmt: skip
        done = subprocess.run(command, cwd=public, capture_output=True, text=True, timeout=1500)
    finally:
        shutil.rmtree(public, ignore_errors=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
