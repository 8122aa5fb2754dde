"""The interpreters that the package supports, as far as this machine has them."""

import shutil
from pathlib import Path

SUPPORTED = ("3.10", "3.11", "3.12", "3.13", "3.14")


def find(version: str) -> str | None:
    """The path of an interpreter of a minor version, None where there is none."""
    # The shim of pyenv answers to the name without having the version.
    pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"))
    return str(pyenv[-1]) if pyenv else shutil.which(f"python{version}")
