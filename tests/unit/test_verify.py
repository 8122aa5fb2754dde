"""What two runs of a probe say of a patch, and the runs themselves on a stub upstream."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ultra_patches.proving.verify import Run, judge

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
    assert judge(run(without), run(with_patch, state), ROOT)[0] == verdict


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
    verdict, note = judge(run("defect", path=file), run("clean", "applied", file), root)
    assert verdict == "WRONG CODE"
    assert file in note


def test_the_parts_of_megatron_are_one_upstream() -> None:
    file = "/env/megatron/training/training.py"
    assert judge(run("defect", path=file), run("clean", "applied", file), "/env/megatron/core")[0] == "corrected"


@pytest.fixture
def vllm(site: Site) -> Site:
    site.write(META, "def f():\n    return 'upstream'\n")
    site.distribution("vllm", "0.26.0")
    return site


def verify(site: Site, *, cwd: Path | None = None) -> tuple[int, dict[str, str]]:
    ended = site.start("-m", "ultra_patches", "verify", "toy", "--json", cwd=cwd)
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


def test_a_probe_that_dies_is_inconclusive_and_says_how(vllm: Site) -> None:
    vllm.declare(
        "import os\n\ntoy = declare('toy', (META, 'f'), probe=lambda: os._exit(7))\nknown('affected', toy)", "toy"
    )
    code, row = verify(vllm)
    assert (code, row["verdict"]) == (0, "inconclusive")
    assert "the process ended with 7" in row["note"]


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
