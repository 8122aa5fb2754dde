"""The digest of a function follows its code and nothing else."""

from __future__ import annotations

import ast
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ultra_patches.core import fingerprint

PLAIN = """\
def f(a, b=1):
    c = a + b
    if c:
        return c
    return None
"""


def digest(text: str, name: str = "f") -> str:
    source = fingerprint.read(textwrap.dedent(text), name)
    assert source is not None
    return source.digest


@pytest.mark.parametrize(
    "same",
    [
        PLAIN.replace("c = a + b", "c = a + b  # the sum"),
        PLAIN.replace("    if c", "    # is it zero?\n    if c"),
        PLAIN.replace("    if c", "\n\n    if c"),
        PLAIN.replace("    c = a + b\n", '    """Adds."""\n    c = a + b\n'),
        PLAIN.replace("    c = a + b\n", "    '''Adds.\n\nAt length.\n    '''\n    c = a + b\n"),
        PLAIN.replace("return c", "return c   "),
        "import os\n\n\n" + PLAIN + "\n\nx = 1\n",
        "if True:\n" + textwrap.indent(PLAIN, "    "),
    ],
    ids=["comment", "comment line", "blank lines", "docstring", "long docstring", "trailing space", "place", "indent"],
)
def test_what_is_no_code_does_not_change_the_digest(same: str) -> None:
    assert digest(same) == digest(PLAIN)


@pytest.mark.parametrize(
    "other",
    [
        PLAIN.replace("a + b", "a - b"),
        PLAIN.replace("b=1", "b=2"),
        PLAIN.replace("if c", "if not c"),
        PLAIN.replace("    return None\n", ""),
        PLAIN.replace("None", "'# None'"),
        PLAIN.replace("def f", "@staticmethod\ndef f"),
        PLAIN.replace("def f", "async def f"),
    ],
)
def test_other_code_has_another_digest(other: str) -> None:
    assert digest(other) != digest(PLAIN)


def test_a_comment_that_starts_at_the_margin_does_not_count() -> None:
    method = "class A:\n    def f(self):\n        x = 1\n        return x\n"
    commented = method.replace("        return", "#       x = 2\n        return")
    assert digest(commented, "A.f") == digest(method, "A.f")


def test_code_on_the_line_of_a_docstring_counts() -> None:
    one, two = (f"def f(x):\n    'Doc.'; return x + {n}\n" for n in (1, 2))
    assert digest(one) != digest(two)


def test_the_head_on_the_line_of_a_docstring_counts() -> None:
    assert digest("def f(x): 'Doc.'\n") != digest("def f(y, z): 'Doc.'\n")


@pytest.mark.parametrize("character", ["\x0c", "\x85", "\u2028"])
def test_characters_that_only_str_splitlines_takes_for_line_ends(character: str) -> None:
    before = f"# a page ends here: {character}\nx = '{character}'\n"
    assert digest(before + PLAIN) == digest(PLAIN)


def test_a_form_feed_does_not_hide_the_last_line() -> None:
    page = "x = 1\n\x0c\n"
    assert digest(page + PLAIN) != digest(page + PLAIN.replace("return None", "return 1"))


@pytest.mark.parametrize(("one", "two"), [("a\n\nb", "a\nb"), ("a \nb", "a\nb"), ("a\n    b", "a\n b")])
def test_the_text_of_a_long_string_counts(one: str, two: str) -> None:
    assert digest(f"def f():\n    return '''{one}'''\n") != digest(f"def f():\n    return '''{two}'''\n")


INDENTED = textwrap.indent(PLAIN, "    ")


@pytest.mark.parametrize(
    "text",
    [
        f"if x:\n{INDENTED}",
        f"if x:\n    pass\nelse:\n{INDENTED}",
        f"if x:\n    pass\nelif y:\n{INDENTED}",
        f"try:\n{INDENTED}except ImportError:\n    pass\n",
        f"try:\n    from fast import f\nexcept ImportError:\n{INDENTED}",
        f"try:\n    import fast\nexcept ImportError:\n    pass\nelse:\n{INDENTED}",
    ],
    ids=["if", "else", "elif", "try", "except", "try else"],
)
def test_found_inside_if_and_try(text: str) -> None:
    assert digest(text) == digest(PLAIN)


def test_a_method_is_that_of_its_class() -> None:
    text = "class A:\n    def f(self):\n        return 1\nclass B:\n    def f(self):\n        return 2\n"
    assert digest(text, "A.f") != digest(text, "B.f")
    assert digest(text, "A.f") == digest("def f(self):\n    return 1\n")


def test_the_last_definition_counts() -> None:
    overloaded = "@overload\ndef f(a: int): ...\n@overload\ndef f(a: str): ...\n" + PLAIN
    assert digest(overloaded) == digest(PLAIN)


@pytest.mark.parametrize("name", ["g", "A", "A.g", "f.g", "x"])
def test_what_is_no_function_is_not_found(name: str) -> None:
    assert fingerprint.read(PLAIN + "class A:\n    x = 1\nx = 2\n", name) is None


def test_text_that_is_not_python_raises() -> None:
    with pytest.raises(SyntaxError):
        fingerprint.read("def f(:\n", "f")


@pytest.mark.parametrize(
    ("head", "shown"),
    [
        ("def f()", "()"),
        ("def f(a, b=1)", "(a, b=)"),
        ("def f(a: int, b: str = 'x') -> int", "(a, b=)"),
        ("def f(a, /, b, *, c, d=2)", "(a, /, b, *, c, d=)"),
        ("def f(a=1, /)", "(a=, /)"),
        ("def f(*args, c=1, **kwargs)", "(*args, c=, **kwargs)"),
        ("async def f(a)", "(a)"),
    ],
)
def test_signature(head: str, shown: str) -> None:
    source = fingerprint.read(f"{head}:\n    pass\n", "f")
    assert source is not None
    assert source.signature == shown


def test_a_default_value_changes_the_digest_but_not_the_signature() -> None:
    one, two = (fingerprint.read(f"def f(a={n}):\n    pass\n", "f") for n in (1, 2))
    assert one is not None
    assert two is not None
    assert (one.digest == two.digest, one.signature == two.signature) == (False, True)


def test_a_decorator_is_told() -> None:
    decorated = fingerprint.read("@cache\ndef f():\n    pass\n", "f")
    plain = fingerprint.read("def f():\n    pass\n", "f")
    assert decorated is not None
    assert plain is not None
    assert (decorated.decorated, plain.decorated) == (True, False)


NAMES = st.sampled_from("abc")
VALUES = st.one_of(st.integers(0, 3).map(str), st.sampled_from(["'#'", '"""\'#"""', "'a # b'", "f'{a}#{b!r:>4}'"]))
SIMPLE = st.one_of(
    st.tuples(NAMES, VALUES).map(lambda t: [f"{t[0]} = {t[1]}"]),
    st.tuples(NAMES, NAMES).map(lambda t: [f"return {t[0]} + {t[1]}"]),
    NAMES.map(lambda n: ["call(", f"    {n},", ")"]),
)
STATEMENTS = st.recursive(
    SIMPLE,
    lambda inner: st.tuples(st.sampled_from(["if a:", "for b in c:", "def g():", "class C:"]), inner).map(
        lambda t: [t[0], *("    " + line for line in t[1])]
    ),
    max_leaves=4,
)
BODIES = st.lists(STATEMENTS, min_size=1, max_size=4).map(lambda parts: [line for part in parts for line in part])


def function(body: list[str]) -> str:
    return "def f(a, b, c):\n" + "".join(f"    {line}\n" for line in body)


@given(BODIES, BODIES)
def test_equal_digests_mean_equal_code(one: list[str], two: list[str]) -> None:
    same_code = ast.dump(ast.parse(function(one))) == ast.dump(ast.parse(function(two)))
    assert (digest(function(one)) == digest(function(two))) == same_code


@given(BODIES, st.data())
def test_noise_anywhere_changes_nothing(body: list[str], data: st.DataObject) -> None:
    noisy = ['"""A docstring, with # in it."""'] if data.draw(st.booleans()) else []
    for line in body:
        noisy += data.draw(st.lists(st.sampled_from(["", "# a comment", "        # 'another'", "   "]), max_size=2))
        noisy.append(line + data.draw(st.sampled_from(["", "  # at the end", "  "])))
    text = function(noisy)
    for head in data.draw(st.lists(st.sampled_from(["if x:", "class A:"]), max_size=2)):
        text = head + "\n" + textwrap.indent(text, "    ")
    name = ".".join(["A"] * text.count("class A:") + ["f"])
    assert digest(text, name) == digest(function(body))
