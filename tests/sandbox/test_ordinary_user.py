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
NEEDED = ("_pytest", "iniconfig", "msgspec", "numpy", "numpy.libs", "packaging", "pluggy", "pyseccomp.py", "pytest",
          "pytest_timeout.py")  # fmt: skip
TESTS = ("test_namespace.py", "test_namespace_isolation.py", "test_namespace_limits.py", "test_namespace_files.py",
         "test_pool.py")  # fmt: skip


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
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in path.parents) and bool(
        path.stat().st_mode & stat.S_IROTH
    )


@pytest.mark.slow
def test_everything_holds_for_an_ordinary_user(user: str, python: str, tmp_path: Path) -> None:
    public = Path("/var/tmp") / f"etude-test-{os.getpid()}"
    try:
        site = Path(sysconfig.get_path("purelib"))
        ignore = shutil.ignore_patterns("__pycache__", "tests", "etude_nano", "*.pyi")
        for name in NEEDED:
            copy = shutil.copytree if (site / name).is_dir() else shutil.copy
            (public / "site").mkdir(parents=True, exist_ok=True)
            if (site / name).exists():
                copy(site / name, public / "site" / name, **({"ignore": ignore} if copy is shutil.copytree else {}))
        shutil.copytree(ROOT / "src" / "etude", public / "site" / "etude", ignore=ignore)
        shutil.copytree(ROOT / "tests" / "sandbox", public / "tests" / "sandbox", ignore=ignore)
        shutil.copy(ROOT / "pyproject.toml", public)
        subprocess.run(["chown", "-R", user, str(public)], check=True)
        os.chmod(public, 0o755)
        command = ["runuser", "-u", user, "--", "env", "-i", f"PYTHONPATH={public}/site:{public}/tests", f"HOME={public}/home",
                   "PATH=/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE=1", python, "-m", "pytest", "-x", "--timeout=300",
                   f"--basetemp={public}/tmp", *(f"tests/sandbox/{name}" for name in TESTS)]  # fmt: skip
        done = subprocess.run(command, cwd=public, capture_output=True, text=True, timeout=1500)
    finally:
        shutil.rmtree(public, ignore_errors=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
