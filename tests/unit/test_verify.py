"""What the runs of a probe say of a patch, and the runs themselves on a stub upstream."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ultra_patches.proving.verify import FAILURES, Run, Runs, judge

from .site_dir import Site, write_module
from .stub import META

ROOT = "/env/vllm"

PROBED = """
def probe():
    import importlib
    value = importlib.import_module(META).f()
    return Finding(Verdict.DEFECT if value == "upstream" else Verdict.CLEAN, f"f gives {value}")

toy = declare("toy", (META, "f"), probe=probe)
"""


def run(verdict: str, state: str = "disabled", path: str = f"{ROOT}/meta.py") -> Run:
    return Run(verdict, f"seen {verdict}", state, f"reason of {state}", files={META: path})


@pytest.mark.parametrize(
    ("without", "with_patch", "state", "verdict"),
    [
        ("defect", "clean", "applied", "corrected"),
        ("defect", "clean", "applied-late", "corrected"),
        ("defect", "clean", "drifted", "MISJUDGED"),
        ("defect", "defect", "applied", "NOT CORRECTED"),
        ("defect", "defect", "drifted", "NOT CORRECTED"),
        ("defect", "defect", "not-needed", "MISJUDGED"),
        ("clean", "clean", "not-needed", "not needed"),
        ("clean", "clean", "applied", "MISJUDGED"),
        ("clean", "defect", "applied", "NOT CORRECTED"),
        ("inconclusive", "clean", "applied", "inconclusive"),
        ("defect", "inconclusive", "applied", "inconclusive"),
        ("absent", "absent", "not-needed", "not needed"),
        ("absent", "absent", "drifted", "DRIFTED"),
    ],
)
def test_judged(without: str, with_patch: str, state: str, verdict: str) -> None:
    alone = run(with_patch, state)
    assert judge(Runs(run(without), alone, None), ROOT)[0] == verdict
    assert judge(Runs(run(without), alone, alone), ROOT)[0] == verdict, "together as alone"


@pytest.mark.parametrize(
    ("without", "alone", "together", "state", "verdict"),
    [
        ("defect", "clean", "defect", "applied", "SPOILED"),
        ("clean", "clean", "defect", "not-needed", "SPOILED"),
        ("defect", "clean", "clean", "conflict", "MISJUDGED"),
        ("defect", "clean", "inconclusive", "applied", "inconclusive"),
        ("defect", "inconclusive", "clean", "applied", "inconclusive"),
        ("defect", "inconclusive", "defect", "applied", "NOT CORRECTED"),
        ("defect", "defect", "clean", "applied", "NOT CORRECTED"),
        ("clean", "clean", "clean", "not-needed", "not needed"),
    ],
)
def test_the_verdict_is_the_worse_of_alone_and_together(
    without: str, alone: str, together: str, state: str, verdict: str
) -> None:
    own = "not-needed" if without == "clean" else "applied"
    judged, note = judge(Runs(run(without), run(alone, own), run(together, state)), ROOT)
    assert judged == verdict
    assert note or verdict not in FAILURES


@pytest.mark.parametrize("seen", ["defect", "inconclusive"])
def test_the_patch_that_spoils_another_is_named(seen: str) -> None:
    spoiled = replace(run(seen, "applied"), spoiled_by="other")
    verdict, note = judge(Runs(run("defect"), run("clean", "applied"), spoiled), ROOT)
    assert verdict == "SPOILED"
    assert note.startswith("spoiled by other: clean after revert of other")


@pytest.mark.parametrize(
    ("root", "file"),
    [
        ("/env/vllm", "/src/vllm/meta.py"),
        ("/env/vllm", "/env/vllm-fork/vllm/meta.py"),
        ("/home/megatron/env/vllm", "/home/other/vllm/meta.py"),
        ("/env/megatron/core", "/src/megatron/core/meta.py"),
    ],
)
def test_a_probe_that_ran_other_code_says_nothing(root: str, file: str) -> None:
    verdict, note = judge(Runs(run("defect", path=file), run("clean", "applied", file), None), root)
    assert verdict == "WRONG CODE"
    assert file in note


def test_the_parts_of_megatron_are_one_upstream() -> None:
    file = "/env/megatron/training/training.py"
    runs = Runs(run("defect", path=file), run("clean", "applied", file), None)
    assert judge(runs, "/env/megatron/core")[0] == "corrected"


@pytest.fixture
def vllm(site: Site) -> Site:
    site.write(META, "def f():\n    return 'upstream'\n")
    site.distribution("vllm", "0.26.0")
    site.write("torch.version", "__version__ = '2.9.0'\n")  # one torch for interpreters with and without site-packages
    return site


def verify(
    site: Site, *flags: str, cwd: Path | None = None, env: dict[str, str] | None = None
) -> tuple[int, dict[str, Any]]:
    ended = site.start("-m", "ultra_patches", "verify", "toy", "--json", *flags, cwd=cwd, env=env)
    assert ended.stdout, ended.stderr
    return ended.code, json.loads(ended.stdout)["patches"][0]


def test_corrected_on_a_source_that_is_in_no_known_release(vllm: Site) -> None:
    """The run without the patch keeps its verdict, and with it the run with the patch applies."""
    vllm.declare(PROBED, "toy")
    code, row = verify(vllm)
    assert (code, row["verdict"]) == (0, "corrected")
    assert vllm.ask(f"import ultra_patches, {META}\nreport(row('toy')['state'])") == "applied"


def test_a_patch_that_does_not_correct_fails(vllm: Site) -> None:
    vllm.declare(PROBED.replace('"f")', '"f", lambda original, module: lambda: "upstream")'), "toy")
    code, row = verify(vllm)
    assert (code, row["verdict"]) == (1, "NOT CORRECTED")


@pytest.mark.parametrize("status", [7, 0])
def test_a_probe_that_dies_is_inconclusive_and_says_how(vllm: Site, status: int) -> None:
    probe = f"probe=lambda: os._exit({status})"
    vllm.declare(f"import os\n\ntoy = declare('toy', (META, 'f'), {probe})\nknown('affected', toy)", "toy")
    code, row = verify(vllm)
    assert (code, row["verdict"]) == (0, "inconclusive")
    assert f"the process ended with {status}" in row["note"]


def test_a_patch_is_verified_with_everything_that_it_needs(vllm: Site) -> None:
    vllm.write("vllm.more", "def one():\n    return 'upstream'\n\ndef two():\n    return 'upstream'\n")
    vllm.declare(
        "first = declare('first', ('vllm.more', 'one'))\n"
        "second = declare('second', ('vllm.more', 'two'), requires=('first',))\n"
        + PROBED.replace("probe=probe", "probe=probe, requires=('second',)")
        + "known('affected', first, second, toy)\n",
        "first",
        "second",
        "toy",
    )
    code, row = verify(vllm)
    assert (code, row["verdict"]) == (0, "corrected"), row["note"]


def test_no_verdict_is_kept_for_code_that_did_not_run(vllm: Site, tmp_path: Path) -> None:
    """Run in the checkout of another vLLM, the probes import that one; the one that is installed stays unknown."""
    vllm.declare(PROBED, "toy")
    checkout = tmp_path / "checkout"
    write_module(checkout, META, "def f():\n    return 'fixed'\n")
    verify(vllm, cwd=checkout)
    assert vllm.ask(f"import ultra_patches, {META}\nreport(row('toy')['state'])") == "drifted"


#: `g` is as good as what it calls. The probe wants `f` corrected and `g` as it was.
TOGETHER = """
def probe():
    import importlib
    meta = importlib.import_module(META)
    seen = [meta.f(), meta.g()]
    return Finding(Verdict.CLEAN if seen == WANTED else Verdict.DEFECT, f"f and g give {seen}")

WANTED = ["corrected", "upstream"]
toy = declare("toy", (META, "f"), probe=probe, over=("harmless",))
harmless = declare("harmless", (META, "f"))
toy_spoils = declare("toy-spoils", (META, "f", lambda original, module: lambda: "broken"), over=("toy", "harmless"))
brings = declare("brings", ("vllm.other", "h"))
known("affected", toy, harmless, toy_spoils, brings)
"""


@pytest.fixture
def other(vllm: Site) -> Site:
    vllm.write("vllm.other", "def h():\n    return 'upstream'\n")
    vllm.write(
        META,
        """
        import sys

        def f():
            return "upstream"

        def g():
            return sys.modules["vllm.other"].h() if "vllm.other" in sys.modules else "upstream"
        """,
    )
    return vllm


def test_a_patch_that_another_spoils_fails_and_that_one_is_named(other: Site) -> None:
    """`toy-spoils` is set over `toy` and does not call it."""
    other.declare(TOGETHER, "toy", "harmless", "toy-spoils")
    code, row = verify(other)
    assert (code, row["verdict"]) == (1, "SPOILED")
    assert [row[mode]["verdict"] for mode in ("without", "alone", "together")] == ["defect", "clean", "defect"]
    assert row["together"]["spoiled_by"] == "toy-spoils"
    assert row["note"].startswith("spoiled by toy-spoils: clean after revert of toy-spoils")
    assert row["together"]["state"] == "applied", "which is why only the probe can tell"

    code, row = verify(other, "--alone")
    assert (code, row["verdict"], row["together"]) == (0, "corrected", None)

    code, row = verify(other, env={"ULTRA_PATCHES_DISABLE": "toy-spoils"})
    assert (code, row["verdict"]) == (0, "corrected"), "together is what the environment sets"


def test_a_patch_that_brings_a_defect_where_nothing_is_needed_is_named(other: Site) -> None:
    """Its module is imported as in a program, though the probe does without."""
    other.declare(
        TOGETHER.replace('["corrected", ', '["upstream", ') + 'known("unaffected", toy)\nknown("affected", brings)\n',
        "toy",
        "brings",
    )
    code, row = verify(other)
    assert (code, row["verdict"]) == (1, "SPOILED"), row["note"]
    assert (row["alone"]["state"], row["together"]["spoiled_by"]) == ("not-needed", "brings")
