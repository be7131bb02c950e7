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
    """test tests testing _testing conftest.py _vendor vendor vendored _vendored extern externals external third_party
    thirdparty site-packages lib2to3 idlelib turtledemo __pycache__ locale locales examples example""".split()
)
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
    wheel: str = ""
    """File name of the wheel; empty for the standard library, which is read where it lies."""
    sha256: str = ""
    """Digest of the wheel, hex."""


STDLIB = Package(
    name="python", version="{}.{}.{}".format(*sys.version_info[:3]), licence="PSF-2.0", role="train"
)
"""The standard library of the Python that runs."""

_ROWS = """
final funcy 2.1 BSD-3-Clause funcy-2.1-py3-none-any.whl 290794186530c944f7e444d2e28b98f33a55685f2bfb9b7a61dac564decab8f8
final inflection 0.5.1 MIT inflection-0.5.1-py2.py3-none-any.whl f38b2b640938a4f35ade69ac3d053042959b62a0f1076a5bbaa1b9526605a8a2
final isodate 0.7.2 BSD-3-Clause isodate-0.7.2-py3-none-any.whl 28009937d8031054830160fce6d409ed342816b543597cece116d966c6d99e15
final jellyfish 1.3.0 MIT jellyfish-1.3.0-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl ba22c3b00803137989fced037749ac62edf7921d743c46ee1a542fab0b41f08d
final more-itertools 11.2.1 MIT more_itertools-11.2.1-py3-none-any.whl 35a7377edd1dd6608dcb2cdf534ded55ea32d49448875ad042cd3f879fb1ded0
final mpmath 1.4.1 BSD-3-Clause mpmath-1.4.1-py3-none-any.whl dc4f0ea2304480d4a9a48a94c1020571558ade522b44a6912efac63a586e140f
final parse 1.22.4 MIT parse-1.22.4-py2.py3-none-any.whl ae430a4477316eed4a9710f642b2db968ec89d5d82e6b0908b8169673b476847
final pydash 8.1.0 MIT pydash-8.1.0-py3-none-any.whl 61df790f303288df7da3a766c3ca6ea5a8f3ec882b28712bac8d13573dbaba97
final python-string-utils 1.0.0 MIT python_string_utils-1.0.0-py3-none-any.whl f1a88700baf99db1a9b6953f44181ad9ca56623c81e257e6009707e2e7851fa4
final wcwidth 0.9.4 MIT wcwidth-0.9.4-cp310-abi3-manylinux2014_x86_64.manylinux_2_17_x86_64.whl b185c8b927b23af2721be1783499d1cfa5c028b098b0858951b4ae224477f1c2
final webcolors 25.10.0 BSD-3-Clause webcolors-25.10.0-py3-none-any.whl 032c727334856fc0b968f63daa252a1ac93d33db2f5267756623c210e57a4f1d
heldout algorithms 1.0.1 MIT algorithms-1.0.1-py3-none-any.whl f45568f40011b264195e7879ef42b043ea1be744479e7b3292a895edef167f64
heldout boltons 26.2.0 BSD-3-Clause boltons-26.2.0-py3-none-any.whl 41942cbce440211bbcf2487ccdc356964ad674f95a01068b8a0dd7a1d1fed036
heldout convertdate 2.5.1 MIT convertdate-2.5.1-py3-none-any.whl f78f2c06d27825e6926aa14b2824845b7aeacbfbe426e8097681f160b12bb724
heldout humanize 4.17.0 MIT humanize-4.17.0-py3-none-any.whl 02d0899527760efe18011944f882df4970943b4cdff7b5a0ba7fed43a576ef98
heldout natsort 8.4.0 MIT natsort-8.4.0-py3-none-any.whl 4732914fb471f56b5cce04d7bae6f164a592c7712e1c85f9ef585e197299521c
heldout python-slugify 9.2.0 MIT python_slugify-9.2.0-py3-none-any.whl 7298dcfc65e9ccdf834b3c398f163af0d09a9a8fc1ee6a7b2dffd8d38bfb756e
heldout textdistance 4.6.3 MIT textdistance-4.6.3-py3-none-any.whl 0cb1b2cc8e3339ddc3e0f8c870e49fb49de6ecc42a718917308b3c971f34aa56
heldout toolz 1.2.0 BSD-3-Clause toolz-1.2.0-py3-none-any.whl 890f820b1cb8152785aaf9386d8707770110809035800985ca65cb24ce1120ef
train astropy 8.0.2 BSD-3-Clause astropy-8.0.2-cp311-abi3-manylinux2014_x86_64.manylinux_2_17_x86_64.manylinux_2_28_x86_64.whl 000d6998bcf4f097257b3776f29f1dafde0967bf1b091edbad95df564eee4eea
train babel 2.19.0 BSD-3-Clause babel-2.19.0-py3-none-any.whl 6d49734aed1d595b2c065d012174df8c83964692f26fc461702281634dd7555b
train cirq-core 1.7.0 Apache-2.0 cirq_core-1.7.0-py3-none-any.whl 9d2e9610b06e2b2b2195184f44c0df4e94f31485831f8e1c6a96c858b7897bce
train django 5.2.19 BSD-3-Clause django-5.2.19-py3-none-any.whl 5965d974a5218a2b68a11dd1276434707f23886525c23f0598eccedaf4f4ca00
train faker 40.63.0 MIT faker-40.63.0-py3-none-any.whl 36627c20b575b4138f54b6c21f8703e9ab122fd487aca11319beec2aa6ca7232
train fonttools 4.68.0 MIT fonttools-4.68.0-cp311-cp311-manylinux2014_x86_64.manylinux_2_17_x86_64.whl 4b9c89b5876f1a74b1341632dfaf4c4c2be565d76c060445df401ebe7a4ceefa
train matplotlib 3.11.2 PSF-2.0 matplotlib-3.11.2-cp311-cp311-manylinux2014_x86_64.manylinux_2_17_x86_64.whl 07d9b9fa60cd4c393692f50d0bb03123242ddf61c99bb0e95e75feb354e7c1a8
train moto 5.2.5 Apache-2.0 moto-5.2.5-py3-none-any.whl eef62cdcf3bfe73e0863743511ba042dfaba04ba3d5ecdcb896a196c693ad528
train music21 10.5.1 BSD-3-Clause music21-10.5.1-py3-none-any.whl dc3309498c4c95cebdf8d4f20c868deb6b63bce1d929cad4f51a7ccc982987b1
train mypy 2.4.1 MIT mypy-2.4.1-cp311-cp311-manylinux2014_x86_64.manylinux_2_17_x86_64.manylinux_2_28_x86_64.whl b69a15fc2e75858d6b15e91ed3a0dcff1a533265183b64734138791fe0f49aa5
train networkx 3.6.1 BSD-3-Clause networkx-3.6.1-py3-none-any.whl d47fbf302e7d9cbbb9e2555a0d267983d2aa476bac30e90dfbe5669bd57f3762
train nltk 3.10.4 Apache-2.0 nltk-3.10.4-py3-none-any.whl 769ba5413f265b7d3e87cd163cc28efa01e29eeef8bb6080bc907949d9fcfb51
train numba 0.68.1 BSD-2-Clause numba-0.68.1-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl 58fe7a3810261cf13797d8aa94c018cfe91e1e8adf634df60eb60ef834f9367b
train numpy 2.4.6 BSD-3-Clause numpy-2.4.6-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl 89cd468399cfd2504718f0ba50e410dca55a170b61a02ad92bb18c8a65186e93
train pandas 3.1.1 BSD-3-Clause pandas-3.1.1-cp311-cp311-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl 4f1602f614bb83f443381dbcbb94c4ac764b2e50c8d6c965614c5cd83e328c47
train pygments 2.21.0 BSD-2-Clause pygments-2.21.0-py3-none-any.whl 2363c69b61c4a97c838da3b130dcd6468f4848992b21a82f2a63ec34377137d9
train reportlab 5.1.0 BSD-3-Clause reportlab-5.1.0-py3-none-any.whl 59fdbaec5efe437095ad1d7292ec9a271c8ca2d3ec75e889c6e61400929b90df
train scikit-learn 1.9.1 BSD-3-Clause scikit_learn-1.9.1-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl 52a0703bbc07ad27f560fa63fa68e4c54dd735bfbbf65b4dd3c225dc7547b6df
train scipy 1.17.1 BSD-3-Clause scipy-1.17.1-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl 43af8d1f3bea642559019edfe64e9b11192a8978efbd1539d7bc2aaa23d92de4
train sphinx 9.0.4 BSD-2-Clause sphinx-9.0.4-py3-none-any.whl 5bebc595a5e943ea248b99c13814c1c5e10b3ece718976824ffa7959ff95fffb
train sqlalchemy 2.1.9 MIT sqlalchemy-2.1.9-cp311-cp311-manylinux2014_x86_64.manylinux_2_17_x86_64.manylinux_2_28_x86_64.whl 3a24b459e52b3ac138f6a05e99a4bd0589443a1ae18041a59c1cfdee12134a2b
train sqlglot 30.30.0 MIT sqlglot-30.30.0-py3-none-any.whl 06c4c212a7868c7dcff0fd0fda348dd3c5cbad40137b3083a70ecdfe22921cf9
train statsmodels 0.15.0 BSD-3-Clause statsmodels-0.15.0-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl b67886b66d9c7ca118526accedb5c6de7ffd74c015dc0492ea0b1690192b65da
train sympy 1.14.0 BSD-3-Clause sympy-1.14.0-py3-none-any.whl e091cc3e99d2141a0ba2847328f5479b05d94a6635cb96148ccb3f34671bd8f5
train transformers 5.24.0 Apache-2.0 transformers-5.24.0-py3-none-any.whl ff5ebedf9359f94bb63772b6380eba6e7104d010cbbb2cb82c788817ea7486f6
train twisted 26.10.0 MIT twisted-26.10.0-py3-none-any.whl 3732f42af218925a0fe78d6668db55853f7fb532245a89a2669babe7d3000fa8
train yt-dlp 2026.10.26 Unlicense yt_dlp-2026.10.26-py3-none-any.whl a05c5b5d8562f7e8a62f5334348b406af4930d56d3a65f8021d14af0e22339ae
"""

PACKAGES: tuple[Package, ...] = (
    *(
        Package(role=role, name=name, version=version, licence=licence, wheel=wheel, sha256=sha256)
        for role, name, version, licence, wheel, sha256 in (row.split() for row in _ROWS.strip().splitlines())
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
    missing = [package for package in packages if package.wheel and not (cache / package.wheel).exists()]
    for package in missing:
        with tempfile.TemporaryDirectory(dir=cache, prefix=".fetch-") as folder:
            _download(package, Path(folder))
            (Path(folder) / package.wheel).replace(cache / package.wheel)
    return missing


def _download(package: Package, folder: Path) -> None:
    """One wheel into `folder`. Only wheels are asked for: building a source distribution would run its code."""
    pin = folder / "pin.txt"
    pin.write_text(f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--require-hashes", "--requirement", str(pin), "--dest", str(folder), "--python-version", "3.11"]
    command += ["--implementation", "cp", "--abi", "cp311", "--abi", "abi3", "--abi", "none"]
    for tag in _TAGS:
        command += ["--platform", tag]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not (folder / package.wheel).exists():
        raise TaskError(
            f"the sources of {package.name} {package.version} could not be fetched",
            cause=(done.stderr.strip().splitlines() or ["pip brought another file"])[-1],
            hint="check the network and pip's index; wheels already fetched are kept",
        )


def sources(package: Package, cache: Path) -> Iterator[tuple[str, str]]:
    """(dotted module, source) of each Python file of the package's own code, in order of path.

    Files that are not UTF-8 are left out. Raises TaskError when the wheel is missing from `cache` or is not the pinned one.
    """
    if not package.wheel:
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
            f"{cache / package.wheel} is not the pinned wheel", cause="its SHA-256 differs", hint="delete it, fetch again"
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
    outside = _SKIPPED_PARTS.intersection(path.parts) or any(part.endswith((".data", ".dist-info")) for part in path.parts)
    return path.suffix == ".py" and not outside and not path.name.startswith("test_")


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
    if not package.wheel:
        path = Path(sysconfig.get_paths()["stdlib"]) / "LICENSE.txt"
        return {"LICENSE.txt": path.read_text()} if path.exists() else {"LICENSE.txt": _PYTHON_LICENCE}
    with zipfile.ZipFile(io.BytesIO(_wheel(package, cache))) as wheel:
        found = {}
        for name in sorted(wheel.namelist()):
            path = PurePosixPath(name)
            stem = path.name.lower()
            if path.parts[0].endswith(".dist-info") and stem.startswith(("licen", "copying", "notice", "authors")):
                found["/".join(path.parts[1:])] = wheel.read(name).decode("utf-8", "replace")
    return found
