"""Our hooks beside wrapt's post-import hooks, which libraries for tracing use on the same modules."""

from __future__ import annotations

import pytest

from .site_dir import Site

SCRIPT = """
import importlib, sys, wrapt
from ultra_patches.core import hooks

calls = []
def theirs():
    wrapt.register_post_import_hook(lambda module: calls.append("theirs"), "vllm.meta")
def ours():
    hooks.watch("vllm.meta", lambda module, late: calls.append("ours"))
"""


@pytest.fixture
def wrapt_site(site: Site) -> Site:
    site.library("wrapt")
    site.write("vllm.meta", "def f():\n    return 'upstream'\n")
    return site


@pytest.mark.parametrize("order", ["theirs(); ours()", "ours(); theirs()"])
def test_each_is_called_once_whoever_was_first(wrapt_site: Site, order: str) -> None:
    calls = wrapt_site.ask(f"{SCRIPT}\n{order}\nimport vllm.meta\nreport(sorted(calls))", env={"ULTRA_PATCHES": "off"})
    assert calls == ["ours", "theirs"]


@pytest.mark.parametrize("order", ["theirs(); ours()", "ours(); theirs()"])
def test_the_loader_is_the_one_without_us(wrapt_site: Site, order: str) -> None:
    """wrapt leaves a loader of its own on a module that it watches: we add nothing to that."""
    show = "report([type(m.__loader__).__qualname__, type(m.__spec__.loader).__qualname__])"
    code = f"{SCRIPT}\n{{order}}\nimport vllm.meta as m\n{show}"
    alone = wrapt_site.ask(code.format(order="theirs()"), env={"ULTRA_PATCHES": "off"})
    both = wrapt_site.ask(code.format(order=order), env={"ULTRA_PATCHES": "off"})
    assert both == alone


@pytest.mark.parametrize("order", ["theirs(); ours()", "ours(); theirs()"])
def test_ours_is_called_again_on_reload(wrapt_site: Site, order: str) -> None:
    code = (
        f"{SCRIPT}\n{order}\nimport vllm.meta\ncalls.clear()\nimportlib.reload(vllm.meta)\nreport(calls.count('ours'))"
    )
    assert wrapt_site.ask(code, env={"ULTRA_PATCHES": "off"}) == 1


@pytest.fixture
def traced(wrapt_site: Site) -> Site:
    """A patch of ours, and a library whose post-import hook wraps the same function."""
    wrapt_site.declare("toy = declare('toy', ('vllm.meta', 'f'))\nknown('affected', toy)", "toy")
    wrapt_site.write(
        "tracing.patcher",
        """
        import wrapt

        def trace(wrapped, instance, args, kwargs):
            return "traced " + wrapped(*args, **kwargs)

        def install(module):
            wrapt.wrap_function_wrapper(module, "f", trace)

        wrapt.register_post_import_hook(install, "vllm.meta")
        """,
    )
    return wrapt_site


@pytest.mark.parametrize("order", ["tracing.patcher, ultra_patches", "ultra_patches, tracing.patcher"])
def test_a_wrapper_that_their_hook_sets_is_a_conflict(traced: Site, order: str) -> None:
    row, value = traced.ask(f"import {order}, vllm.meta\nreport([row('toy'), vllm.meta.f()])")
    assert value.startswith("traced")
    assert row["state"] == "conflict"
    assert "tracing.patcher.trace" in row["reason"]
