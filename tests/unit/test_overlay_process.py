"""What the overlay does to a process: what it imports, when it reads its settings, forks, warnings and strict mode."""

from __future__ import annotations

import pytest

from .site_dir import Site
from .stub import META

TOY = "toy = declare('toy', (META, 'f'))\n"
AFFECTED = TOY + "known('affected', toy)\n"


@pytest.fixture
def vllm(site: Site) -> Site:
    site.write(META, "def f():\n    return 'upstream'\n")
    site.distribution("vllm", "0.20.0")
    return site


def test_arming_imports_no_upstream_and_nothing_heavy(vllm: Site) -> None:
    """All patches of the overlay are declared and hooked; everything they may want to import lies on the path."""
    for name in ("torch", "megatron.core", "megatron.bridge", "numpy", "ray", "transformers"):
        vllm.write(f"{name}.any")
    loaded = vllm.ask("""
        import sys, ultra_patches
        heavy = ("vllm", "megatron", "torch", "numpy", "ray", "transformers", "packaging", "rich", "unittest")
        report([sorted({m.split(".")[0] for m in sys.modules} & set(heavy)), len(ultra_patches.core.ledger.entries) >= 8])
    """)
    assert loaded == [[], True]


def test_off_touches_nothing(vllm: Site) -> None:
    vllm.declare(AFFECTED, "toy")
    same, value, state = vllm.ask(
        f"""
        import sys
        before = list(sys.meta_path)
        import ultra_patches, {META} as meta
        report([sys.meta_path == before, meta.f(), row("toy")["state"]])
        """,
        env={"ULTRA_PATCHES": "off"},
    )
    assert (same, value, state) == (True, "upstream", "disabled")


@pytest.mark.parametrize("variable", ["ULTRA_PATCHES=off", "ULTRA_PATCHES_DISABLE=toy", "ULTRA_PATCHES_ONLY=other"])
def test_what_is_set_before_the_target_is_imported_counts(vllm: Site, variable: str) -> None:
    vllm.declare(AFFECTED, "toy")
    name, _, value = variable.partition("=")
    row, result = vllm.ask(f"""
        import os, ultra_patches
        os.environ["{name}"] = "{value}"
        import {META} as meta
        report([row("toy"), meta.f()])
    """)
    assert (row["state"], result) == ("disabled", "upstream")


def test_what_is_unset_before_the_target_is_imported_counts(vllm: Site) -> None:
    vllm.declare(AFFECTED, "toy")
    code = f"""
        import os, ultra_patches
        del os.environ["ULTRA_PATCHES_DISABLE"]
        import {META} as meta
        report([row("toy")["state"], meta.f()])
    """
    assert vllm.ask(code, env={"ULTRA_PATCHES_DISABLE": "toy"}) == ["applied", "corrected"]


def test_what_was_off_at_import_is_never_said_to_be_armed(vllm: Site) -> None:
    vllm.declare(AFFECTED, "toy")
    code = 'import os, ultra_patches\ndel os.environ["ULTRA_PATCHES"]\nreport(row("toy")["state"])'
    assert vllm.ask(code, env={"ULTRA_PATCHES": "off"}) == "disabled"


@pytest.mark.parametrize("imported", ["before", "after"])
def test_a_fork_has_its_own_process_id_and_the_patch(vllm: Site, imported: str) -> None:
    vllm.declare(AFFECTED, "toy")
    parent, child, pids = vllm.ask(f"""
        import importlib, json, os, ultra_patches
        if {imported!r} == "before":
            importlib.import_module("{META}")
        read, write = os.pipe()
        forked = os.fork()
        if forked == 0:
            value = importlib.import_module("{META}").f()
            os.write(write, json.dumps([row("toy"), value]).encode())
            os._exit(0)
        os.waitpid(forked, 0)
        report([row("toy"), json.loads(os.read(read, 65536)), [os.getpid(), forked]])
    """)
    assert (child[0]["state"], child[1]) == ("applied", "corrected")
    assert parent["state"] == ("applied" if imported == "before" else "armed")
    assert [parent["pid"], child[0]["pid"]] == pids


@pytest.mark.parametrize("flags", [("-W", "error"), ("-W", "error::UserWarning")])
def test_warnings_as_errors_do_not_end_the_import(vllm: Site, flags: tuple[str, str]) -> None:
    vllm.declare(TOY, "toy")
    ended = vllm.run(f"import ultra_patches, {META} as meta\nreport(meta.f())", flags=flags)
    assert ended.value == "upstream"
    assert ended.stderr.startswith("ultra-patches: toy is drifted")
    assert ended.stderr.count("\n") == 1


def test_a_setting_that_means_nothing_is_a_warning(vllm: Site) -> None:
    vllm.declare(AFFECTED, "toy")
    ended = vllm.run("import ultra_patches\nreport(row('toy')['state'])", env={"ULTRA_PATCHES_DISABLE": "toi"})
    assert ended.value == "armed"
    assert ended.stderr.count("no patch is called 'toi' (did you mean toy?)") == 1


STRICT = """
    try:
        {first}
        {second}
        report("went on")
    except RuntimeError as error:
        report([type(error).__name__, str(error)])
"""


def test_strict_raises_at_import_of_the_overlay(vllm: Site) -> None:
    vllm.declare(TOY, "toy")
    code = STRICT.format(first="import ultra_patches", second="")
    kind, text = vllm.ask(code, env={"ULTRA_PATCHES": "strict"})
    assert kind == "UltraPatchesError"
    assert text.startswith("toy is drifted: ")


def test_strict_raises_at_import_of_the_target_each_time(vllm: Site) -> None:
    vllm.declare(
        "def fail(*_):\n    raise ValueError('no')\n\ntoy = declare('toy', (META, 'f', fail))\nknown('affected', toy)",
        "toy",
    )
    code = "import ultra_patches\n" + "\n".join(
        f"try:\n    import {META}\nexcept ultra_patches.UltraPatchesError as error:\n    seen{n} = str(error)"
        for n in (1, 2)
    )
    one, two = vllm.ask(f"{code}\nreport([seen1, seen2])", env={"ULTRA_PATCHES": "strict"})
    assert one == two
    assert one.startswith("toy is failed: ValueError: no")


@pytest.mark.parametrize("variable", ["ULTRA_PATCHES_DISABLE", "ULTRA_PATCHES_ONLY"])
def test_strict_raises_on_an_unknown_id(vllm: Site, variable: str) -> None:
    vllm.declare(AFFECTED, "toy")
    code = STRICT.format(first="import ultra_patches", second="")
    kind, text = vllm.ask(code, env={"ULTRA_PATCHES": "strict", variable: "toi"})
    assert (kind, "did you mean toy?" in text) == ("UltraPatchesError", True)


def test_strict_goes_on_where_everything_is_in_force(vllm: Site) -> None:
    vllm.declare(AFFECTED, "toy")
    code = STRICT.format(first=f"import ultra_patches, {META}", second="")
    assert vllm.ask(code, env={"ULTRA_PATCHES": "strict"}) == "went on"


def test_disarming_puts_everything_back(vllm: Site) -> None:
    vllm.declare(AFFECTED, "toy")
    same, value, rows = vllm.ask(f"""
        import sys
        before = list(sys.meta_path)
        import ultra_patches, {META} as meta
        ultra_patches.core.overlay.disarm()
        report([sys.meta_path == before, meta.f(), ultra_patches.status()])
    """)
    assert (same, value, rows) == (True, "upstream", [])


def test_a_spawned_process_is_patched_by_the_import_alone(vllm: Site) -> None:
    vllm.declare(AFFECTED, "toy")
    vllm.write(
        "job", f"import ultra_patches, os\n\ndef work():\n    import {META} as meta\n    return meta.f(), os.getpid()\n"
    )
    vllm.write(
        "main",
        "import concurrent.futures, multiprocessing, os, job\nfrom unit import stub\n\nif __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:\n"
        "        value, pid = pool.submit(job.work).result()\n    stub.report([pid != os.getpid(), value])\n",
    )
    ended = vllm.start(str(vllm.root / "main.py"))
    assert ended.value == [True, "corrected"], ended.stderr


SUBINTERPRETER = """
    import importlib
    try:
        interpreters = importlib.import_module("_interpreters")
    except ImportError:
        interpreters = importlib.import_module("_xxsubinterpreters")
    inner = interpreters.create()
    failure = interpreters.run_string(inner, {code!r})
    assert failure is None, failure
    import os, sys
    sys.stdout.flush()
    # Python 3.12.1 may crash when it takes down extension modules that both interpreters have.
    {end}
"""


def test_a_sub_interpreter_is_refused_clearly(vllm: Site) -> None:
    vllm.declare(AFFECTED, "toy")
    code = f"from unit.stub import *\nimport ultra_patches, {META} as meta\nreport([row('toy'), meta.f()])\n"
    ended = vllm.run(SUBINTERPRETER.format(code=code, end="os._exit(0)"))
    row, value = ended.value
    assert (row["state"], row["reason"], value) == (
        "disabled",
        "ultra_patches was imported in a sub-interpreter",
        "upstream",
    )
    assert ended.stderr.count("ultra_patches sets nothing in a sub-interpreter") == 1
    assert "use a process of its own" in ended.stderr


def test_the_main_interpreter_goes_on_beside_one(vllm: Site) -> None:
    vllm.declare(AFFECTED, "toy")
    assert vllm.ask(f"""
        import ultra_patches
        {SUBINTERPRETER.format(code="pass", end="pass").strip().replace(chr(10), chr(10) + "    ")}
        import {META} as meta
        report([row("toy")["state"], meta.f()])
    """) == ["applied", "corrected"]


@pytest.mark.parametrize("when", ["atexit", "thread", "del"])
def test_an_import_while_the_interpreter_shuts_down_is_no_error(vllm: Site, when: str) -> None:
    vllm.declare(AFFECTED, "toy")
    ended = vllm.run(f"""
        import atexit, importlib, threading
        def late():
            print(importlib.import_module({META!r}).f(), flush=True)
        class Late:
            def __del__(self):
                try:
                    late()
                except (ImportError, TypeError, AttributeError):
                    print("too late for Python itself", flush=True)
        if {when!r} == "atexit":
            atexit.register(late)
        elif {when!r} == "thread":
            threading.Thread(target=lambda: (threading.main_thread().join(), late())).start()
        else:
            kept = Late()
        import ultra_patches
    """)
    assert ended.stderr == ""
    assert ended.stdout.strip() in ({"corrected"} if when != "del" else {"corrected", "too late for Python itself"})
