"""The Python sources of a release: whole trees for running it, single files for reading it.

Everything is fetched once, checked against the index's SHA-256 where a whole file comes down, and kept under
`$XDG_CACHE_HOME/ultra-patches/releases`. vLLM comes as its sdist (the wheels hold 300 MB of binaries), Megatron as wheels.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import os
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path

import requests
from packaging.version import Version
from pypi_simple import PYPI_SIMPLE_ENDPOINT, DistributionPackage, NoSuchProjectError, PyPISimple
from remotezip import RangeNotSupported, RemoteZip, RemoteZipError

from ultra_patches.core import facts
from ultra_patches.untrusted import shown, without_credentials


class FetchError(Exception):
    """What cannot be fetched, from where, and what to do, in one line."""


#: What reading a truncated or corrupt archive raises. Where the index gives no SHA-256 nothing else shows it.
_BROKEN = (zipfile.BadZipFile, tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError)


def cache() -> Path:
    """The folder of fetched releases."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "ultra-patches", "releases")


@functools.cache
def packages(project: str) -> tuple[DistributionPackage, ...]:
    """Every file that the index lists for a project, by the index that pip or uv are set to.

    No error of a request is passed on, here and below: its text has the address, and that may hold a password or a token.
    """
    endpoint = os.environ.get("UV_DEFAULT_INDEX") or os.environ.get("PIP_INDEX_URL") or PYPI_SIMPLE_ENDPOINT
    try:
        with PyPISimple(endpoint) as client:
            return tuple(client.get_project_page(project, timeout=60).packages)
    except NoSuchProjectError:
        raise FetchError(f"the package index has no project {project}") from None
    except requests.RequestException as error:
        raise FetchError(f"the package index cannot be read ({type(error).__name__}): check the network") from None
    except ValueError as error:
        where = without_credentials(endpoint)
        raise FetchError(f"{where} is no package index ({type(error).__name__}): check UV_DEFAULT_INDEX") from None


def package(project: str, release: str, kind: str) -> DistributionPackage:
    """One file of a release. Raises FetchError for a release that does not exist, is yanked or has no such file."""
    listed = [p for p in packages(project) if p.version == release]
    if not listed:
        newest = max((p.version for p in packages(project) if p.version), key=Version, default="none")
        raise FetchError(f"{project} {release} does not exist in the package index (the newest is {newest})")
    if all(p.is_yanked for p in listed):
        raise FetchError(f"{project} {release} was yanked: {shown(listed[0].yanked_reason or 'no reason given')}")
    fitting = [p for p in listed if p.package_type == kind and _fits(p.filename)]
    if not fitting:
        raise FetchError(f"{project} {release} has no {kind} for this machine in the package index")
    return fitting[-1]


def _fits(filename: str) -> bool:
    return (
        not filename.endswith(".whl")
        or "none-any" in filename
        or ("abi3-manylinux" in filename and ("x86_64" in filename))
        or ("cp312" in filename and "x86_64" in filename)
    )


def tree(project: str, release: str) -> Path:
    """A folder for PYTHONPATH with the Python files of a release. Raises FetchError."""
    folder = cache() / f"{project}-{release}"
    if folder.is_dir():
        return folder
    kind = "sdist" if project == "vllm" else "wheel"
    found = package(project, release, kind)
    content = _download(found)
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=folder.name, dir=folder.parent))
    try:
        if kind == "sdist":
            _unpack_sdist(content, staging)
            _pretend_cpu_build(project, release, staging)
        else:
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                for name in archive.namelist():
                    if not name.endswith(".so"):
                        archive.extract(name, staging)
        staging.chmod(0o755)
        staging.replace(folder)
    except _BROKEN as error:
        raise FetchError(f"{found.filename} arrived broken ({type(error).__name__}): fetch it again") from error
    except OSError as error:
        if not folder.is_dir():
            raise FetchError(f"{folder} cannot be written ({error.strerror}): free some room") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return folder


def with_operators(sources: Path, folder: Path) -> Path:
    """The sources of a vLLM release, in `folder`, with the compiled operators of the installed one beside them."""
    made = folder / sources.name
    shutil.copytree(sources, made, copy_function=os.link, ignore=shutil.ignore_patterns("__pycache__"))
    installed = facts.locate("vllm")
    assert installed is not None, "vLLM is not installed"
    for operators in installed.root.glob("*.so"):
        (made / "vllm" / operators.name).symlink_to(operators)
    return made


def _download(found: DistributionPackage) -> bytes:
    try:
        response = requests.get(found.url, timeout=300)
        response.raise_for_status()
    except requests.RequestException as error:
        raise FetchError(f"{found.filename} cannot be downloaded ({type(error).__name__}): check the network") from None
    digest = hashlib.sha256(response.content).hexdigest()
    wanted = found.digests.get("sha256", digest)
    if digest != wanted:
        raise FetchError(
            f"{found.filename} arrived with SHA-256 {digest[:12]}…, the index says {wanted[:12]}…: fetch it again"
        )
    return response.content


def _unpack_sdist(content: bytes, target: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for member in archive:
            inner = member.name.partition("/")[2]
            if member.isfile() and inner.startswith("vllm/") and inner.endswith((".py", ".json")):
                member.name = inner
                archive.extract(member, target, filter="data")


def _pretend_cpu_build(project: str, release: str, target: Path) -> None:
    """Write metadata with the version `+cpu`, by which vLLM knows that it runs on CPU: an sdist has none.

    Not for 0.17, whose CPU platform needs what the torch of the test stack no longer has. Without a platform its functions
    work, its layers do not.
    """
    if release.startswith("0.17."):
        return
    info = target / f"{project}-{release}+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project}\nVersion: {release}+cpu\n", encoding="utf-8"
    )


def files(project: str, release: str, names: Iterable[str]) -> dict[str, str | None]:
    """The text of some files of a release's wheel, None for one it does not have. Raises FetchError.

    Read by HTTP range requests, a few hundred kB of a wheel of 300 MB; where the index has none, the whole wheel is fetched.
    """
    wanted = list(names)
    folder = cache() / f"{project}-{release}"
    if folder.is_dir():
        return {n: (folder / n).read_text(encoding="utf-8") if (folder / n).is_file() else None for n in wanted}
    kept = cache() / "files" / f"{project}-{release}"
    missing = [n for n in wanted if not (kept / n).exists() and not (kept / f"{n}.absent").exists()]
    if missing:
        _read_parts(package(project, release, "wheel"), missing, kept)
    return {n: (kept / n).read_text(encoding="utf-8") if (kept / n).is_file() else None for n in wanted}


def _read_parts(found: DistributionPackage, names: list[str], kept: Path) -> None:
    try:
        try:
            archive: zipfile.ZipFile = RemoteZip(found.url, timeout=60)
        except RangeNotSupported:
            archive = zipfile.ZipFile(io.BytesIO(_download(found)))
        with archive:
            have = set(archive.namelist())
            contents = {name: archive.read(name) if name in have else None for name in names}
    except (RemoteZipError, requests.RequestException, *_BROKEN) as error:
        why = shown(error) or type(error).__name__
        raise FetchError(f"{found.filename} cannot be read ({why}): fetch it again") from None
    try:
        for name, content in contents.items():
            _keep(kept / (f"{name}.absent" if content is None else name), content or b"")
    except OSError as error:
        raise FetchError(f"{kept} cannot be written ({error.strerror}): free some room") from error


def _keep(path: Path, content: bytes) -> None:
    """Write a file whole or not at all: half of one would be taken for the release's from then on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(content)
    temporary.replace(path)
