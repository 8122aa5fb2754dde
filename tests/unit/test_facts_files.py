"""Versions and functions are read from files that may be broken; nothing in them is run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ultra_patches.core import facts

KEY = "vllm.meta:f"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """An upstream's folder that no `sys.path` needs to hold."""
    root = tmp_path / "vllm"
    root.mkdir()
    (root / "__init__.py").touch()
    return root


def upstream(root: Path) -> facts.Upstream:
    return facts.Upstream("vllm", "vllm", root, "0.20.0", None, None)


def stated(tmp_path: Path, text: str | bytes) -> str | None:
    path = tmp_path / "_version.py"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return facts._stated_version(path)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("__version__ = version = '0.32.0'\n__version_tuple__ = version_tuple = (0, 32, 0)\n", "0.32.0"),
        ("version: str\n__version__ = '0.24.0.dev12+g1abc'\n", "0.24.0.dev12+g1abc"),
        ("MAJOR = 0\nMINOR = 19\nPATCH = 2\nPRE_RELEASE = ''\n", "0.19.2"),
        ("MAJOR = 0\nMINOR = 17\nPATCH = 0\nPRE_RELEASE = 'rc0'\n", "0.17.0rc0"),
        ("MAJOR = 0\nMINOR = 17\n", None),
        ("version = 'dev'\n", "dev"),
        ("__version__ = '0.23.0-nv25.09'\n", "0.23.0-nv25.09"),
        ("version = '.'.join(('0', '20'))\n", None),
        ("version = 0.2\n", None),
        ("", None),
    ],
)
def test_stated_version(tmp_path: Path, text: str, version: str | None) -> None:
    assert stated(tmp_path, text) == version


@pytest.mark.parametrize(
    "broken",
    [b"version = '0.20.0\n", b"<<<<<<< HEAD\nversion = '0.20.0'\n", b"version = '\xff'\n", b"\0" * 64, b"(" * 500],
    ids=["cut off", "merge conflict", "not utf-8", "zeros", "nested"],
)
def test_a_broken_version_file_states_nothing(tmp_path: Path, broken: bytes) -> None:
    assert stated(tmp_path, broken) is None


def test_no_version_file_states_nothing(tmp_path: Path) -> None:
    assert facts._stated_version(tmp_path / "_version.py") is None


@pytest.mark.parametrize("version", ["dev", "0.23.0-nv25.09", "0.24.0_ascend", "0.24.0rc1", "0.24.0.dev12+g1abc"])
def test_a_version_that_sorts_nowhere_is_passed_on(tree: Path, version: str) -> None:
    same = facts.Upstream("vllm", "vllm", tree, version, "vllm", version)
    other = facts.Upstream("vllm", "vllm", tree, version, "vllm", "0.20.0")
    assert same.conflict is None
    assert version in str(other.conflict)


@pytest.mark.parametrize("version", ["", None])
def test_without_a_version_there_is_no_conflict(tree: Path, version: str | None) -> None:
    assert facts.Upstream("vllm", "vllm", tree, version, "vllm", "0.20.0").conflict is None


def test_a_function_is_read(tree: Path) -> None:
    (tree / "meta.py").write_text("def f(a, b=1):\n    return a\n")
    source = facts.read_source(upstream(tree), KEY)
    assert source is not None
    assert source.signature == "(a, b=)"


@pytest.mark.parametrize(
    "text",
    [b"def g(): pass\n", b"def f(:\n", b"def f(): return '\xff'\n", b"\0" * 64],
    ids=["absent", "syntax", "not utf-8", "zeros"],
)
def test_a_function_that_cannot_be_read_is_none(tree: Path, text: bytes) -> None:
    (tree / "meta.py").write_bytes(text)
    assert facts.read_source(upstream(tree), KEY) is None


def test_a_module_that_is_missing_is_none(tree: Path) -> None:
    assert facts.read_source(upstream(tree), KEY) is None


def test_a_module_saved_with_a_byte_order_mark(tree: Path) -> None:
    (tree / "meta.py").write_bytes(b"\xef\xbb\xbfdef f(): pass\n")
    assert facts.read_source(upstream(tree), KEY) is not None


def test_a_module_in_another_encoding(tree: Path) -> None:
    (tree / "meta.py").write_bytes(b"# coding: latin-1\ndef f(): return '\xe4'\n")
    assert facts.read_source(upstream(tree), KEY) is not None


def test_a_file_that_was_rewritten_is_read_again(tree: Path) -> None:
    (tree / "meta.py").write_text("def f(): return 1\n")
    before = facts.read_source(upstream(tree), KEY)
    (tree / "meta.py").write_text("def f(): return 2\n")
    os.utime(tree / "meta.py", (1, 1))
    after = facts.read_source(upstream(tree), KEY)
    assert before is not None
    assert after is not None
    assert before.digest != after.digest


def test_file_digest(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert facts.file_digest(tmp_path / "a") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
