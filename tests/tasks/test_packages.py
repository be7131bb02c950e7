import hashlib
import zipfile
from pathlib import Path

import pytest

from etude.errors import TaskError
from etude.tasks.packages import PACKAGES, PERMISSIVE, ROLES, STDLIB, Package, fetch, licence_texts, sources

METADATA = {
    "pond-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: pond\nVersion: 1.0\n",
    "pond-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "pond-1.0.dist-info/RECORD": "",
}


def wheel(folder: Path, files: dict[str, str]) -> Package:
    path = folder / "pond-1.0.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Package(name="pond", version="1.0", licence="MIT", role="train", sha256=digest)


def test_the_list_is_pinned_permissive_and_of_at_most_forty_packages() -> None:
    listed = [package for package in PACKAGES if package is not STDLIB]
    assert 20 < len(listed) <= 40
    assert len({package.name for package in PACKAGES}) == len(PACKAGES)
    assert all(package.licence in PERMISSIVE and package.role in ROLES for package in PACKAGES)
    assert all(len(bytes.fromhex(package.sha256)) == 32 for package in listed)


def test_final_and_heldout_packages_come_before_training_packages() -> None:
    roles = [package.role for package in PACKAGES]
    assert roles == sorted(roles, key=["final", "heldout", "train"].index)


def test_only_a_packages_own_code_is_read(tmp_path: Path) -> None:
    package = wheel(
        tmp_path,
        {
            "pond/__init__.py": "a = 1",
            "pond/frog.py": "b = 2",
            "pond/tests/frog.py": "c = 3",
            "pond/test_frog.py": "d = 4",
            "pond/_vendor/six.py": "e = 5",
            "pond/data.txt": "f",
            "pond-1.0.data/scripts/run.py": "g = 7",
            "pond-1.0.dist-info/METADATA": "h",
        },
    )
    assert dict(sources(package, tmp_path)) == {"pond": "a = 1", "pond.frog": "b = 2"}


def test_a_file_that_is_not_utf8_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "pond-1.0.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("pond/latin.py", "x = '\xe9'".encode("latin-1"))
        archive.writestr("pond/utf.py", "y = 1")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    package = Package(name="pond", version="1.0", licence="MIT", role="train", sha256=digest)
    assert [module for module, _ in sources(package, tmp_path)] == ["pond.utf"]


def test_another_wheel_under_the_pinned_name_is_refused(tmp_path: Path) -> None:
    package = wheel(tmp_path, {"pond/__init__.py": ""})
    wheel(tmp_path, {"pond/__init__.py": "changed = True"})
    with pytest.raises(TaskError, match="not the pinned wheel"):
        list(sources(package, tmp_path))


def test_a_package_that_was_not_fetched_is_named(tmp_path: Path) -> None:
    package = Package(name="pond", version="1.0", licence="MIT", role="train", sha256="00" * 32)
    with pytest.raises(TaskError, match=r"pond 1\.0 is not in"):
        list(sources(package, tmp_path))


def test_licence_texts_of_a_wheel_are_found_by_name(tmp_path: Path) -> None:
    package = wheel(
        tmp_path,
        {
            "pond-1.0.dist-info/licenses/LICENSE.md": "Permission is",
            "pond-1.0.dist-info/RECORD": "",
            "pond/COPYING": "",
        },
    )
    assert licence_texts(package, tmp_path) == {"licenses/LICENSE.md": "Permission is"}


def test_the_standard_library_has_sources_and_a_licence(tmp_path: Path) -> None:
    modules = {module for module, _ in sources(STDLIB, tmp_path)}
    assert {"textwrap", "json.decoder", "collections"} <= modules
    assert not any(module.startswith(("test.", "idlelib")) for module in modules)
    assert "PYTHON" in licence_texts(STDLIB, tmp_path)["LICENSE.txt"].upper()


def test_a_fetched_wheel_is_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    package = wheel(tmp_path, {"pond/__init__.py": ""})
    assert fetch([package, STDLIB], tmp_path) == []


def test_a_wheel_is_fetched_by_digest_and_only_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index is a folder with one wheel."""
    index, cache = tmp_path / "index", tmp_path / "cache"
    index.mkdir()
    package = wheel(index, {"pond/__init__.py": "a = 1", **METADATA})
    (index / package.wheel).rename(index / "pond-1.0-py3-none-any.whl")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    other = Package(name="pond", version="1.0", licence="MIT", role="train", sha256="00" * 32)
    with pytest.raises(TaskError, match=r"pond 1\.0 could not be fetched"):
        fetch([other], cache)
    assert list(cache.iterdir()) == []
    assert fetch([package], cache) == [package]
    assert dict(sources(package, cache)) == {"pond": "a = 1"}
