"""Each state that a user can read, in a fresh process with a stub vLLM."""

from __future__ import annotations

import json

import pytest

from .site_dir import Site
from .stub import LAYERWISE, META

TOY = "toy = declare('toy', (META, 'get_numel_loaded'))\n"
AFFECTED = TOY + "known('affected', toy)\n"
UNAFFECTED = TOY + "known('unaffected', toy)\n"


@pytest.fixture
def vllm(site: Site) -> Site:
    """A vLLM whose `layerwise` takes a function out of `meta`, as the real one does."""
    site.write(META, "def get_numel_loaded():\n    return 'upstream'\n")
    site.write(LAYERWISE, "from .meta import get_numel_loaded\n\ndef load():\n    return get_numel_loaded()\n")
    site.distribution("vllm", "0.20.0")
    return site


def test_not_installed(site: Site) -> None:
    site.declare(TOY, "toy")
    row = site.ask("report(row('toy'))")
    assert (row["state"], row["reason"], row["version"]) == ("not-installed", "vllm is not installed", None)


def test_armed(vllm: Site) -> None:
    vllm.declare(AFFECTED, "toy")
    row = vllm.ask("report(row('toy'))")
    assert (row["state"], row["version"], row["targets"]) == ("armed", "0.20.0", [f"{META}:get_numel_loaded"])
    assert row["reason"] == "same source as in 0.20.0, which is affected"


def test_applied_before_anyone_takes_the_name(vllm: Site) -> None:
    vllm.declare(AFFECTED, "toy")
    row, value = vllm.ask(f"import ultra_patches, {LAYERWISE} as layerwise\nreport([row('toy'), layerwise.load()])")
    assert (row["state"], row["rebound"], value) == ("applied", 0, "corrected")


def test_applied_late_with_the_references_counted(vllm: Site) -> None:
    vllm.declare(AFFECTED, "toy")
    row, value = vllm.ask(f"import {LAYERWISE} as layerwise, ultra_patches\nreport([row('toy'), layerwise.load()])")
    assert (row["state"], row["rebound"], value) == ("applied-late", 1, "corrected")


def test_applied_within_a_circle_of_imports_leaves_nothing_stale(vllm: Site) -> None:
    vllm.write(META, f"def get_numel_loaded():\n    return 'upstream'\n\nimport {LAYERWISE}\n")
    vllm.declare(AFFECTED, "toy")
    row, value = vllm.ask(
        f"import ultra_patches, {META}, {LAYERWISE} as layerwise\nreport([row('toy'), layerwise.load()])"
    )
    assert row["state"] in ("applied", "applied-late")
    assert value == "corrected"


def test_not_needed(vllm: Site) -> None:
    vllm.declare(UNAFFECTED, "toy")
    row, value = vllm.ask(f"import ultra_patches, {LAYERWISE} as layerwise\nreport([row('toy'), layerwise.load()])")
    assert (row["state"], value) == ("not-needed", "upstream")


def test_disabled(vllm: Site) -> None:
    vllm.declare(AFFECTED, "toy")
    code = f"import ultra_patches, {LAYERWISE} as layerwise\nreport([row('toy'), layerwise.load()])"
    row, value = vllm.ask(code, env={"ULTRA_PATCHES_DISABLE": "toy"})
    assert (row["state"], row["reason"], value) == ("disabled", "listed in ULTRA_PATCHES_DISABLE", "upstream")


def test_drifted_is_said_once_with_the_next_step(vllm: Site) -> None:
    vllm.declare(TOY, "toy")
    ended = vllm.run(f"""
        import importlib, ultra_patches, {META} as meta
        importlib.reload(meta)
        report([row('toy'), meta.get_numel_loaded()])
    """)
    assert (ended.value[0]["state"], ended.value[1]) == ("drifted", "upstream")
    assert ended.stderr.count("UltraPatchesWarning") == 1
    assert "toy is drifted" in ended.stderr
    assert "run `ultra-patches verify toy`" in ended.stderr


def test_drifted_is_not_said_where_the_upstream_is_not_imported(vllm: Site) -> None:
    vllm.declare(TOY, "toy")
    assert vllm.run("import ultra_patches\nreport(row('toy'))").stderr == ""


@pytest.mark.parametrize("constant", ["SKIP_TENSORS", "SKIP_LOAD_TENSORS"])
def test_a_constant_that_moved_into_another_function_is_never_patched_over(vllm: Site, constant: str) -> None:
    """A patch for releases that read SKIP_TENSORS must not count as applied where another name is read."""
    vllm.write(
        META, "def get_numel_loaded():\n    return 'upstream'\n\ndef skips(name):\n    return name in SKIP_TENSORS\n"
    )
    vllm.declare(
        f"toy = declare('toy', (META, 'get_numel_loaded'), watches=(META + ':skips',))\nknown('affected', toy)\n"
        f"from pathlib import Path\nfile = Path(__file__).parent.joinpath(*META.split('.')).with_suffix('.py')\n"
        f"file.write_text(file.read_text().replace('SKIP_TENSORS', {constant!r}))\n",
        "toy",
    )
    state = vllm.ask(f"import ultra_patches, {META}\nreport(row('toy')['state'])")
    assert state == ("applied" if constant == "SKIP_TENSORS" else "drifted")


def test_conflict_with_what_was_there_first(vllm: Site) -> None:
    vllm.declare(AFFECTED, "toy")
    vllm.write(
        "rival.patcher",
        f"import {META} as meta\n\ndef theirs():\n    return 'theirs'\n\nmeta.get_numel_loaded = theirs\n",
    )
    ended = vllm.run(
        f"import rival.patcher, ultra_patches, {META} as meta\nreport([row('toy'), meta.get_numel_loaded()])"
    )
    row, value = ended.value
    assert (row["state"], value) == ("conflict", "theirs")
    assert "rival.patcher.theirs" in row["reason"]
    assert str(vllm.root / "rival" / "patcher.py") in row["reason"]
    assert "remove it, or keep it and disable ours" in ended.stderr


@pytest.mark.parametrize("kind", ["staticmethod", "classmethod"])
def test_a_foreign_wrapper_on_a_static_method_is_a_conflict(vllm: Site, kind: str) -> None:
    vllm.write(META, f"class Engine:\n    @{kind}\n    def send(*args):\n        return 'upstream'\n")
    vllm.declare("toy = declare('toy', (META, 'Engine.send'))\nknown('affected', toy)", "toy")
    vllm.write(
        "rival.patcher",
        f"""
        import functools
        from {META} import Engine

        before = vars(Engine)["send"].__func__

        @functools.wraps(before)
        def theirs(*args):
            return "theirs, then " + before(*args)

        Engine.send = {kind}(theirs)
        """,
    )
    row, value = vllm.ask(
        f"import rival.patcher, ultra_patches, {META} as meta\nreport([row('toy'), meta.Engine.send()])"
    )
    assert (row["state"], value) == ("conflict", "theirs, then upstream")


def test_replaced_after_ours_is_a_conflict_and_is_not_reverted_over(vllm: Site) -> None:
    vllm.declare(AFFECTED, "toy")
    row, error, value, after = vllm.ask(f"""
        import ultra_patches, {META} as meta
        def theirs():
            return "theirs"
        meta.get_numel_loaded = theirs
        before = row("toy")
        try:
            ultra_patches.revert("toy")
            error = None
        except ultra_patches.UltraPatchesError as raised:
            error = str(raised)
        report([before, error, meta.get_numel_loaded(), row("toy")["state"]])
    """)
    assert (row["state"], after, value) == ("conflict", "conflict", "theirs")
    assert "set by us, then replaced" in row["reason"]
    assert "toy cannot be reverted" in error


def test_removed_after_ours_does_not_break_the_status(vllm: Site) -> None:
    vllm.declare(AFFECTED, "toy")
    state = vllm.ask(f"import ultra_patches, {META} as meta\ndel meta.get_numel_loaded\nreport(row('toy')['state'])")
    assert state == "conflict"


def test_reverted_stays_reverted_through_a_reload(vllm: Site) -> None:
    vllm.declare(AFFECTED, "toy")
    rows, values = vllm.ask(f"""
        import importlib, ultra_patches, {LAYERWISE} as layerwise, {META} as meta
        ultra_patches.revert("toy")
        rows, values = [row("toy")["state"]], [layerwise.load(), meta.get_numel_loaded()]
        importlib.reload(meta)
        report([rows + [row("toy")["state"]], values + [meta.get_numel_loaded()]])
    """)
    assert rows == ["reverted", "reverted"]
    assert values == ["upstream"] * 3


def test_reloaded_is_patched_again(vllm: Site) -> None:
    vllm.declare(AFFECTED, "toy")
    row, value = vllm.ask(f"""
        import importlib, ultra_patches, {META} as meta
        importlib.reload(meta)
        report([row("toy"), meta.get_numel_loaded()])
    """)
    assert (row["state"], value) == ("applied", "corrected")


def test_reverted_after_a_reload_leaves_no_binding_of_ours(vllm: Site) -> None:
    vllm.declare(AFFECTED, "toy")
    values = vllm.ask(f"""
        import importlib, ultra_patches, {LAYERWISE} as layerwise, {META} as meta
        importlib.reload(meta)
        ultra_patches.revert("toy")
        report([meta.get_numel_loaded(), layerwise.load()])
    """)
    assert values == ["upstream", "upstream"]


def test_removed_from_sys_modules_and_imported_again_is_patched_again(vllm: Site) -> None:
    vllm.declare(AFFECTED, "toy")
    row, value = vllm.ask(f"""
        import importlib, sys, ultra_patches, {META}
        del sys.modules["{META}"]
        report([row("toy"), importlib.import_module("{META}").get_numel_loaded()])
    """)
    assert (row["state"], value) == ("applied", "corrected")


def test_arming_twice_changes_nothing(vllm: Site) -> None:
    vllm.declare(AFFECTED, "toy")
    one, two = vllm.ask(f"""
        import {LAYERWISE}, ultra_patches
        before = row("toy")
        ultra_patches.core.overlay.arm()
        report([before, row("toy")])
    """)
    assert one == two


def test_arming_twice_does_not_make_it_late(vllm: Site) -> None:
    vllm.declare(AFFECTED, "toy")
    state = vllm.ask(f"import ultra_patches, {META}\nultra_patches.core.overlay.arm()\nreport(row('toy')['state'])")
    assert state == "applied"


def test_a_row_is_plain_data_with_these_fields(vllm: Site) -> None:
    vllm.declare(AFFECTED, "toy")
    row = vllm.ask("import ultra_patches\nreport(row('toy'))")
    assert list(row) == ["id", "title", "upstream", "version", "state", "reason", "targets", "rebound", "pid"]
    assert json.loads(json.dumps(row)) == row
