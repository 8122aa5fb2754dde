"""A broken declaration of somebody else is said, with its distribution, and takes no other patch with it."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.site_dir import Ended, Site
from tests.unit.stub import declare
from ultra_patches.core.declaration import KINDS, fault
from ultra_patches.core.gate import Evidence, State, decide_all
from ultra_patches.core.lock import Lock
from ultra_patches.core.order import circles, clashes, in_order
from ultra_patches.core.settings import Settings
from ultra_patches.patch import Patch, Target, Variant

from .machines import Machine

HEAD = "from stub import *\nfrom ultra_patches.patch import *\n\n"
#: What a declaration is, and what is said of it.
FIELDS = {
    "id none": ("PATCH = declare(None, ('vllm.leaf', 'f'))", "NoneType for id"),
    "id number": ("PATCH = declare(3, ('vllm.leaf', 'f'))", "int for id"),
    "id list": ("PATCH = declare([], ('vllm.leaf', 'f'))", "list for id"),
    "id empty": ("PATCH = declare('', ('vllm.leaf', 'f'))", "has id ''"),
    "id path": ("PATCH = declare('../bad', ('vllm.leaf', 'f'))", "has id '../bad'"),
    "upstream none": ("PATCH = declare('bad', ('vllm.leaf', 'f'), upstream=None)", "NoneType for upstream"),
    "variants none": ("PATCH = declare('bad', variants=None)", "NoneType for variants"),
    "variants list": ("PATCH = declare('bad', variants=[1])", "list for variants"),
    "variants empty": ("PATCH = declare('bad', variants=())", "no variant"),
    "targets text": ("PATCH = declare('bad', variants=(Variant('all', 'vllm.leaf:f'),))", "str for targets of Variant"),
    "targets none": ("PATCH = declare('bad')", "no required target"),
    "target number": ("PATCH = declare('bad', (3, 'f'))", "int for module of Target"),
    "target empty": ("PATCH = declare('bad', ('', 'f'))", "has target ':f'"),
    "target zero": ("PATCH = declare('bad', ('vllm\\0leaf', 'f'))", "not package.module and function"),
    "build none": ("PATCH = declare('bad', ('vllm.leaf', 'f', None))", "NoneType for build"),
    "probe none": ("PATCH = declare('bad', ('vllm.leaf', 'f'), probe=None)", "NoneType for probe"),
    "requires list": ("PATCH = declare('bad', ('vllm.leaf', 'f'), requires=['toy'])", "list for requires"),
    "requires text": ("PATCH = declare('bad', ('vllm.leaf', 'f'), requires='toy')", "str for requires"),
    "over none": ("PATCH = declare('bad', ('vllm.leaf', 'f'), over=None)", "NoneType for over"),
    "watches numbers": ("PATCH = declare('bad', ('vllm.leaf', 'f'), watches=(1,))", "tuple for watches"),
    "withdraw text": ("PATCH = declare('bad', ('vllm.leaf', 'f'), withdraw='no')", "str for withdraw"),
    "half made": ("PATCH = object.__new__(Patch)", "AttributeError"),
    "class": ("PATCH = Patch", "is type, not"),
    "liar": (
        "class Liar:\n    @property\n    def __class__(self):\n        raise OSError('no class')\n\nPATCH = Liar()",
        "OSError: no class",
    ),
    "silent error": (
        "class Silent(Exception):\n    def __str__(self):\n        raise ValueError\n    __repr__ = __str__\n\nraise Silent",
        "Silent",
    ),
    "long error": ("raise ValueError('x' * 10**6 + '\\nsecond line')", "ValueError: xxx"),
    "base error": ("class Base(BaseException):\n    pass\n\nraise Base('end it all')", "Base: end it all"),
    "exits": ("raise SystemExit(3)", "SystemExit: 3"),
    "memory": ("raise MemoryError", "MemoryError"),
    "no python": ("def", "SyntaxError"),
    "taken from us": (
        "PATCH = declare('vllm-packed-alignment', ('vllm.leaf', 'f'))",
        "takes the id 'vllm-packed-alignment'",
    ),
}
#: These can be read, and fail when they are set: text of the declaration, and state and reason of the row.
ROWS = {
    "builds and exits": ("def build(*_):\n    raise SystemExit(3)\n", "failed", "SystemExit: 3"),
    "builds and says nothing": (
        "def build(*_):\n    class Silent(Exception):\n        def __str__(self):\n            raise ValueError\n    raise Silent\n",
        "failed",
        "Silent",
    ),
    "builds nothing": ("def build(*_):\n    return None\n", "failed", "AttributeError"),
}
ENTRY_POINTS = "[ultra_patches.patches]\nbad = {}\n"


def write(root: Path, kind: str, text: str, *, value: str | None = None, points: bytes | None = None) -> None:
    module = "broken_" + kind.replace(" ", "_")
    folder = root / kind
    (folder / f"{module}-1.0.dist-info").mkdir(parents=True)
    (folder / f"{module}.py").write_text(HEAD + text + "\n")
    metadata = folder / f"{module}-1.0.dist-info"
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    value = f"{module}:PATCH" if value is None else value.format(module)
    (metadata / "entry_points.txt").write_bytes(points or ENTRY_POINTS.format(value).encode())


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    root = Path(tempfile.mkdtemp(prefix="ultra-patches-hostile-"))
    try:
        yield Machine(root)
    finally:
        shutil.rmtree(root)


@pytest.fixture(scope="module")
def kinds(machine: Machine) -> Path:
    root = machine.root / "kinds"
    for kind, (text, _) in FIELDS.items():
        write(root, kind, text)
    for kind, (text, _, _) in ROWS.items():
        write(
            root,
            kind,
            text + "\nPATCH = declare('bad', ('vllm.leaf', 'f', build), over=('toy',))\nknown('affected', PATCH)",
        )
    write(root, "no colon", "", value="{}")
    write(root, "no module", "", value="broken_absent:PATCH")
    write(root, "no value", "", value="???")
    write(root, "points bytes", "", points=b"\xff\xfe[ultra_patches.patches]\n")
    write(root, "points garbage", "", points=b"[other.group]\nno table\n")
    write(root, "metadata bytes", "1 / 0")
    (root / "metadata bytes" / "broken_metadata_bytes-1.0.dist-info" / "METADATA").write_bytes(b"Name: \xff\xfe\n")
    write(root, "interrupts", "raise KeyboardInterrupt")
    return root


@pytest.mark.parametrize("version", ["3.10", "3.13"])
def test_each_is_said_and_takes_no_other_with_it(
    machine: Machine, kinds: Path, version: str, record_property: Any
) -> None:
    python = machine.python(version)
    if python is None:
        pytest.skip(f"no Python {version} on this machine")
    result = machine.run(python, "declarations_case.py", str(kinds))
    assert result.pop("interrupts")["import"] == "KeyboardInterrupt", "it may be the user's own"
    assert len(result) == len(FIELDS) + len(ROWS) + 7
    record_property("tried", [len(result) + 1, len(result)])
    ours = sum(point.value.startswith("ultra_patches.") for point in entry_points(group="ultra_patches.patches"))
    for kind, seen in result.items():
        assert (seen["import"], seen["toy"], seen["ours"]) == ("ok", "applied", ours), kind
        said = "\n".join(seen["said"])
        if kind in ROWS:
            _, state, reason = ROWS[kind]
            assert seen["bad"][0] == state, kind
            assert reason in seen["bad"][1], kind
        elif kind != "all":
            assert seen["bad"] is None, kind
            assert f"broken_{kind.replace(' ', '_')}" in said, kind
            assert FIELDS.get(kind, ("", ""))[1] in said, kind
            assert max(map(len, seen["said"])) < 700, kind
            assert not any("\n" in text for text in seen["said"]), kind
    every = "\n".join(result["all"]["said"])
    assert all(f"broken_{kind.replace(' ', '_')}" in every for kind in result if kind not in ROWS and kind != "all")


def test_the_command_says_it_and_exits_with_1(site: Site) -> None:
    site.write("broken", "1 / 0")
    points = ENTRY_POINTS.format("broken:PATCH")
    site.distribution("broken-patches", entry_points=points)
    ended: Ended = site.start("-W", "ignore", "-m", "ultra_patches", "status", "--json")
    assert ended.code == 1
    assert ended.stderr.count("patch 'bad' of broken-patches cannot be read (ZeroDivisionError: division by zero)") == 1
    assert '"unread": [' in ended.stdout


def test_every_annotation_of_a_declaration_is_known() -> None:
    annotations = {str(field.type) for kind in (Patch, Variant, Target) for field in dataclasses.fields(kind)}
    assert annotations == set(KINDS)


#: What somebody might write for any field.
ODD: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.text(max_size=5),
    st.sampled_from(["toy", "other", "a.b", "f", "C.m", len, int, (), [], {}, object()]),
    st.lists(st.text(max_size=3), max_size=3),
    st.lists(st.sampled_from(["toy", "other", "a.b:f"]), max_size=3).map(tuple),
    st.builds(Variant, st.text(max_size=3), st.lists(st.builds(Target, st.sampled_from(["a.b", "", 3]), st.sampled_from(["f", "C.m", "1"]), st.sampled_from([len, None])), max_size=2).map(tuple)).map(lambda variant: (variant,)),
)  # fmt: skip
NAMES = [field.name for field in dataclasses.fields(Patch)]


@given(
    st.dictionaries(st.sampled_from(NAMES), ODD, max_size=4), st.dictionaries(st.sampled_from(NAMES), ODD, max_size=2)
)
def test_what_passes_the_check_can_be_ordered_and_decided(one: dict[str, Any], other: dict[str, Any]) -> None:
    made = [
        dataclasses.replace(declare(name, ("a.b", "f")), **fields) for name, fields in (("toy", one), ("other", other))
    ]
    faults = [fault(patch) for patch in made]
    assert not any(text and "\n" in text for text in faults)
    patches = {patch.id: patch for patch, text in zip(made, faults, strict=True) if text is None}
    in_order(patches)
    circles(tuple(patches.values()))
    found = clashes(tuple(patches.values()))
    evidence = {name: Evidence(None, {}) for name in patches}
    decided = decide_all(patches, evidence, Lock({}, {}, {}), Settings(), clashes=found)
    assert {decision.state for decision in decided.values()} <= {State.NOT_INSTALLED}
