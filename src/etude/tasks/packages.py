"""The packages that functions are taken from: pinned by version and digest, with licences that allow passing them on.

Where in the flow: **packages** -> harvest. `fetch` fills a cache with wheels through pip; `sources` reads Python files
out of them. A wheel is only ever unzipped in memory: nothing of it is installed, imported or run. The role of a package
decides on which side of training its functions fall (see `split`).
"""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from etude.errors import TaskError

PERMISSIVE = frozenset(
    {"MIT", "BSD-2-Clause", "BSD-3-Clause", "Apache-2.0", "PSF-2.0", "ISC", "Zlib", "0BSD", "Unlicense", "CC0-1.0"}
)
"""SPDX names of the licences a package of this list may have."""
ROLES = ("train", "heldout", "final")
_TAGS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_24_x86_64", "manylinux_2_17_x86_64", "any")
_SKIPPED_PARTS = frozenset(
    {
        "test", "tests", "testing", "_testing", "conftest.py", "_vendor", "vendor", "vendored", "_vendored", "extern",
        "externals", "external", "third_party", "thirdparty", "site-packages", "lib2to3", "idlelib", "turtledemo",
        "__pycache__", "locale", "locales", "examples", "example",
    }
)  # fmt: skip
"""Folders of tests, of other people's code and of data: not this package's own code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """One distribution at one version."""

    name: str
    version: str
    licence: str
    """SPDX name, one of `PERMISSIVE`."""
    role: str
    """One of `ROLES`."""
    sha256: str = ""
    """Digest of the wheel, hex; empty for the standard library, which is read where it lies."""

    @property
    def wheel(self) -> str:
        """Name of the wheel in the cache."""
        return f"{self.name}-{self.version}.whl"


STDLIB = Package(name="python", version="{}.{}.{}".format(*sys.version_info[:3]), licence="PSF-2.0", role="train")
"""The standard library of the Python that runs."""

_ROWS = """
final funcy 2.1 BSD-3-Clause 290794186530c944f7e444d2e28b98f33a55685f2bfb9b7a61dac564decab8f8
final inflection 0.5.1 MIT f38b2b640938a4f35ade69ac3d053042959b62a0f1076a5bbaa1b9526605a8a2
final more-itertools 11.2.1 MIT 35a7377edd1dd6608dcb2cdf534ded55ea32d49448875ad042cd3f879fb1ded0
final mpmath 1.4.1 BSD-3-Clause dc4f0ea2304480d4a9a48a94c1020571558ade522b44a6912efac63a586e140f
final pydash 8.1.0 MIT 61df790f303288df7da3a766c3ca6ea5a8f3ec882b28712bac8d13573dbaba97
final wcwidth 0.9.4 MIT b185c8b927b23af2721be1783499d1cfa5c028b098b0858951b4ae224477f1c2
heldout algorithms 1.0.1 MIT f45568f40011b264195e7879ef42b043ea1be744479e7b3292a895edef167f64
heldout boltons 26.2.0 BSD-3-Clause 41942cbce440211bbcf2487ccdc356964ad674f95a01068b8a0dd7a1d1fed036
heldout convertdate 2.5.1 MIT f78f2c06d27825e6926aa14b2824845b7aeacbfbe426e8097681f160b12bb724
heldout humanize 4.17.0 MIT 02d0899527760efe18011944f882df4970943b4cdff7b5a0ba7fed43a576ef98
heldout natsort 8.4.0 MIT 4732914fb471f56b5cce04d7bae6f164a592c7712e1c85f9ef585e197299521c
heldout toolz 1.2.0 BSD-3-Clause 890f820b1cb8152785aaf9386d8707770110809035800985ca65cb24ce1120ef
train astropy 8.0.2 BSD-3-Clause 000d6998bcf4f097257b3776f29f1dafde0967bf1b091edbad95df564eee4eea
train babel 2.19.0 BSD-3-Clause 6d49734aed1d595b2c065d012174df8c83964692f26fc461702281634dd7555b
train cirq-core 1.7.0 Apache-2.0 9d2e9610b06e2b2b2195184f44c0df4e94f31485831f8e1c6a96c858b7897bce
train django 5.2.19 BSD-3-Clause 5965d974a5218a2b68a11dd1276434707f23886525c23f0598eccedaf4f4ca00
train faker 40.63.0 MIT 36627c20b575b4138f54b6c21f8703e9ab122fd487aca11319beec2aa6ca7232
train fonttools 4.68.0 MIT 4b9c89b5876f1a74b1341632dfaf4c4c2be565d76c060445df401ebe7a4ceefa
train matplotlib 3.11.2 PSF-2.0 07d9b9fa60cd4c393692f50d0bb03123242ddf61c99bb0e95e75feb354e7c1a8
train moto 5.2.5 Apache-2.0 eef62cdcf3bfe73e0863743511ba042dfaba04ba3d5ecdcb896a196c693ad528
train music21 10.5.1 BSD-3-Clause dc3309498c4c95cebdf8d4f20c868deb6b63bce1d929cad4f51a7ccc982987b1
train mypy 2.4.1 MIT b69a15fc2e75858d6b15e91ed3a0dcff1a533265183b64734138791fe0f49aa5
train networkx 3.6.1 BSD-3-Clause d47fbf302e7d9cbbb9e2555a0d267983d2aa476bac30e90dfbe5669bd57f3762
train nltk 3.10.4 Apache-2.0 769ba5413f265b7d3e87cd163cc28efa01e29eeef8bb6080bc907949d9fcfb51
train numba 0.68.1 BSD-2-Clause 58fe7a3810261cf13797d8aa94c018cfe91e1e8adf634df60eb60ef834f9367b
train numpy 2.4.6 BSD-3-Clause 89cd468399cfd2504718f0ba50e410dca55a170b61a02ad92bb18c8a65186e93
train pandas 3.1.1 BSD-3-Clause 4f1602f614bb83f443381dbcbb94c4ac764b2e50c8d6c965614c5cd83e328c47
train pygments 2.21.0 BSD-2-Clause 2363c69b61c4a97c838da3b130dcd6468f4848992b21a82f2a63ec34377137d9
train reportlab 5.1.0 BSD-3-Clause 59fdbaec5efe437095ad1d7292ec9a271c8ca2d3ec75e889c6e61400929b90df
train scikit-learn 1.9.1 BSD-3-Clause 52a0703bbc07ad27f560fa63fa68e4c54dd735bfbbf65b4dd3c225dc7547b6df
train scipy 1.17.1 BSD-3-Clause 43af8d1f3bea642559019edfe64e9b11192a8978efbd1539d7bc2aaa23d92de4
train sphinx 9.0.4 BSD-2-Clause 5bebc595a5e943ea248b99c13814c1c5e10b3ece718976824ffa7959ff95fffb
train sqlalchemy 2.1.9 MIT 3a24b459e52b3ac138f6a05e99a4bd0589443a1ae18041a59c1cfdee12134a2b
train sqlglot 30.30.0 MIT 06c4c212a7868c7dcff0fd0fda348dd3c5cbad40137b3083a70ecdfe22921cf9
train statsmodels 0.15.0 BSD-3-Clause b67886b66d9c7ca118526accedb5c6de7ffd74c015dc0492ea0b1690192b65da
train sympy 1.14.0 BSD-3-Clause e091cc3e99d2141a0ba2847328f5479b05d94a6635cb96148ccb3f34671bd8f5
train transformers 5.24.0 Apache-2.0 ff5ebedf9359f94bb63772b6380eba6e7104d010cbbb2cb82c788817ea7486f6
train twisted 26.10.0 MIT 3732f42af218925a0fe78d6668db55853f7fb532245a89a2669babe7d3000fa8
train yt-dlp 2026.10.26 Unlicense a05c5b5d8562f7e8a62f5334348b406af4930d56d3a65f8021d14af0e22339ae
"""

PACKAGES: tuple[Package, ...] = (
    *(
        Package(role=role, name=name, version=version, licence=licence, sha256=sha256)
        for role, name, version, licence, sha256 in (row.split() for row in _ROWS.strip().splitlines())
    ),
    STDLIB,
)
"""Final and held-out packages first: of two copies of a function the harvest keeps the first."""


def default_cache() -> Path:
    """`$XDG_CACHE_HOME/etude/packages`, by default under `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "etude" / "packages"


def fetch(packages: Iterable[Package], cache: Path) -> list[Package]:
    """Downloads the wheels that `cache` lacks, each checked against its digest; returns what was downloaded.

    Raises TaskError when pip fails or a wheel is not the pinned one; wheels fetched before stay.
    """
    cache.mkdir(parents=True, exist_ok=True)
    missing = [package for package in packages if package.sha256 and not (cache / package.wheel).exists()]
    for package in missing:
        with tempfile.TemporaryDirectory(dir=cache, prefix=".fetch-") as folder:
            _download(package, Path(folder)).replace(cache / package.wheel)
    return missing


def _download(package: Package, folder: Path) -> Path:
    """One wheel into `folder`. Only wheels are asked for: building a source distribution would run its code."""
    pin = folder / "pin.txt"
    pin.write_text(f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--require-hashes", "--requirement", str(pin), "--dest", str(folder), "--python-version", "3.11"]
    command += ["--implementation", "cp", "--abi", "cp311", "--abi", "abi3", "--abi", "none"]
    for tag in _TAGS:
        command += ["--platform", tag]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise TaskError(
            f"the sources of {package.name} {package.version} could not be fetched",
            cause=(done.stderr.strip().splitlines() or ["pip brought no wheel"])[-1],
            hint="check the network and pip's index; wheels fetched before are kept",
        )
    return wheels[0]


def sources(package: Package, cache: Path) -> Iterator[tuple[str, str]]:
    """(dotted module, source) of each Python file of the package's own code, in order of path.

    Files that are not UTF-8 are left out. Raises TaskError when the wheel is not in `cache` or not the pinned one.
    """
    if not package.sha256:
        yield from _stdlib_sources()
        return
    with zipfile.ZipFile(io.BytesIO(_wheel(package, cache))) as wheel:
        for name in sorted(wheel.namelist()):
            if _is_own_code(PurePosixPath(name)):
                text = _decode(wheel.read(name))
                if text is not None:
                    yield _dotted(PurePosixPath(name)), text


def _wheel(package: Package, cache: Path) -> bytes:
    try:
        data = (cache / package.wheel).read_bytes()
    except OSError as error:
        raise TaskError(
            f"{package.name} {package.version} is not in {cache}", cause=str(error), hint="fetch the packages first"
        ) from error
    if hashlib.sha256(data).hexdigest() != package.sha256:
        raise TaskError(
            f"{cache / package.wheel} is not the pinned wheel",
            cause="its SHA-256 differs",
            hint="delete it, fetch again",
        )
    return data


def _stdlib_sources() -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = PurePosixPath(path.relative_to(root).as_posix())
        if _is_own_code(relative):
            text = _decode(path.read_bytes())
            if text is not None:
                yield _dotted(relative), text


def _is_own_code(path: PurePosixPath) -> bool:
    foreign = any(part in _SKIPPED_PARTS or part.endswith((".data", ".dist-info")) for part in path.parts)
    return path.suffix == ".py" and not foreign and not path.name.startswith("test_")


def _dotted(path: PurePosixPath) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def _decode(data: bytes) -> str | None:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None


def licence_texts(package: Package, cache: Path) -> dict[str, str]:
    """File name -> text of each licence file that the distribution carries, for shipping next to what came from it."""
    if not package.sha256:
        file = Path(sysconfig.get_paths()["stdlib"]) / "LICENSE.txt"
        pointer = f"PSF-2.0, https://docs.python.org/3/license.html\n{sys.copyright}\n"
        return {"LICENSE.txt": file.read_text() if file.exists() else pointer}
    found = {}
    with zipfile.ZipFile(io.BytesIO(_wheel(package, cache))) as wheel:
        for path in (PurePosixPath(name) for name in sorted(wheel.namelist()) if not name.endswith("/")):
            is_licence = path.name.lower().startswith(("licen", "copying", "notice", "authors"))
            if is_licence and path.parts[0].endswith(".dist-info"):
                found["/".join(path.parts[1:])] = wheel.read(str(path)).decode("utf-8", "replace")
    return found
