"""A lock made on one Python holds on the others: the same source has the same digest on each of them."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.support import pythons
from ultra_patches.core import fingerprint

from .site_dir import PROJECT

TRICKY = {
    "hash in f-string": "def f(a):\n    return f'# {a!r:#x} # {a}'  # comment\n",
    "nested f-string": "def f(a):\n    return f\"{'#' if a else f'{a:>{4}}'}\"  # '#'\n",
    "long f-string": "def f(a):\n    return f'''\n# {a}\n\n  # {{b}}\n'''  # comment\n",
    "nested docstrings": (
        "def f():\n    '''Outer.'''\n    def g():\n        'Inner # 1'\n    class A:\n        '''\n# In a class.\n"
        "        '''\n        def h(self):\n            r'''Raw.'''\n            return g\n    return A\n"
    ),
    "docstring alone": "def f():\n    '''Nothing else.'''\n",
    "comment after docstring alone": "def f():\n    def g():\n        'Doc.'\n        # nothing\n    return g\n",
    "continued lines": "def f(a,\n      b):  # comment\n    return a + \\\n        b  # comment\n",
    "beyond ascii": "def f(ä):\n    '''Größe.'''\n    return 'é # ü', ä  # ñ\n",
    "beyond the plane": "def f():\n    return '𝔘', '#'  # 😀 # comment\n",
    "tabs": "def f():\n\tif f:\n\t\treturn 1  # comment\n\t# comment\n",
    "decorated": "@a.b(  # comment\n    c='#',\n)\n@d\nasync def f():\n    return await e\n",
    "walrus and match": "def f(a):\n    match a:\n        case [1, *_] if (b := a):\n            return b\n",
    "operators": "def f(a):\n    return a @ -a ** ~a // a if not a else lambda *b, **c: (b, c)\n",
    "no newline at the end": "def f():\n    return 1  # comment",
    "windows line ends": "def f():\r\n    # comment\r\n    return '''a\r\nb'''\r\n",
    "method": (
        "class A:\n    def f(self):\n        '''Doc.'''\n\n        return {  # comment\n"
        "            1: '#',\n        }\n"
    ),
}
NAMES = {"method": "A.f"}

#: Printed by any interpreter that can read the overlay's sources.
SCRIPT = """
import json, sys
from ultra_patches.core import fingerprint
sources = {key: fingerprint.read(text, name) for key, (text, name) in json.load(sys.stdin).items()}
print(json.dumps({key: [s.digest, s.signature, s.decorated] for key, s in sources.items()}))
"""


def test_every_python_gives_the_same_digests() -> None:
    given = {key: (text, NAMES.get(key, "f")) for key, text in TRICKY.items()}
    here = {key: fingerprint.read(text, name) for key, (text, name) in given.items()}
    expected = {key: [s.digest, s.signature, s.decorated] for key, s in here.items() if s is not None}
    assert set(expected) == set(TRICKY)
    others = [path for version in pythons.SUPPORTED if (path := pythons.find(version))]
    if len(others) < 2:
        pytest.skip("no Python of another minor version is on this machine")
    for python in others:
        done = subprocess.run(
            [python, "-S", "-c", SCRIPT],
            input=json.dumps(given),
            env={"PYTHONPATH": str(PROJECT), "ULTRA_PATCHES": "off", "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == expected, python


@pytest.mark.parametrize("key", [key for key, text in TRICKY.items() if "# comment" in text and "'''" not in text])
def test_no_comment_is_left_behind(key: str) -> None:
    name = NAMES.get(key, "f")
    cleaned = "\n".join(line.partition("# comment")[0] for line in TRICKY[key].split("\n"))
    given, expected = fingerprint.read(TRICKY[key], name), fingerprint.read(cleaned, name)
    assert given is not None
    assert expected is not None
    assert given.digest == expected.digest
