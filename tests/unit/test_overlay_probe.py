"""A source that is in no known release is probed on import, once what the probe needs has been executed."""

from __future__ import annotations

import pytest

from .site_dir import Site
from .stub import LAYERWISE, META

#: The probe runs what is live, as the real ones do, and says each time that it ran.
PROBED = """
import importlib

ran = []

def probe():
    meta, layerwise = (importlib.import_module(m) for m in (META, LAYERWISE))
    ran.append(layerwise.load())
    defect = ran[-1] == "upstream"
    return Finding(Verdict.DEFECT if defect else Verdict.CLEAN, f"load gives {ran[-1]}")

toy = declare("toy", (META, "f"), probe=probe, probe_after=(LAYERWISE,))
"""
TWO_TARGETS = PROBED.replace('(META, "f")', '(META, "f"), (LAYERWISE, "g")')


@pytest.fixture
def vllm(site: Site) -> Site:
    """A vLLM of which nothing is known: `layerwise` uses what it imports from `meta`."""
    site.write(META, "def f():\n    return 'upstream'\n")
    site.write(LAYERWISE, "from . import meta\n\ndef g():\n    return 'upstream'\n\ndef load():\n    return meta.f()\n")
    site.distribution("vllm", "0.26.0")
    return site


def test_armed_until_what_the_probe_needs_is_there(vllm: Site) -> None:
    vllm.declare(PROBED, "toy")
    row = vllm.ask(f"import ultra_patches, {META}\nreport(row('toy'))")
    assert (row["state"], row["reason"]) == (
        "armed",
        "source of vllm 0.26.0 is in no known release: probed on import",
    )


@pytest.mark.parametrize("declared", [PROBED, TWO_TARGETS], ids=["one target", "two targets"])
def test_the_defect_is_seen_and_corrected(vllm: Site, declared: str) -> None:
    vllm.declare(declared, "toy")
    ended = vllm.run(f"import ultra_patches, {META}, {LAYERWISE} as layerwise\nreport([row('toy'), layerwise.load()])")
    assert (ended.value[0]["state"], ended.value[1]) == ("applied", "corrected")
    assert ended.stderr == ""


def test_the_probe_does_not_run_on_a_module_that_is_half_executed(vllm: Site) -> None:
    """`layerwise` imports `meta`: when `meta` is done, `layerwise` is in sys.modules and has no functions yet."""
    vllm.declare(PROBED, "toy")
    ended = vllm.run(f"import ultra_patches, {LAYERWISE} as layerwise\nreport([row('toy'), layerwise.load()])")
    assert ended.stderr == ""
    assert (ended.value[0]["state"], ended.value[1]) == ("applied", "corrected")


def test_clean_is_not_needed(vllm: Site) -> None:
    vllm.write(META, "def f():\n    return 'fixed'\n")
    vllm.declare(PROBED, "toy")
    row, value = vllm.ask(
        f"import ultra_patches, {META}, {LAYERWISE} as layerwise\nreport([row('toy'), layerwise.load()])"
    )
    assert (row["state"], row["reason"], value) == ("not-needed", "the probe says: load gives fixed", "fixed")


def test_inconclusive_is_drifted_and_said(vllm: Site) -> None:
    vllm.declare("toy = declare('toy', (META, 'f'), probe_after=(META,))", "toy")
    ended = vllm.run(f"import ultra_patches, {META}\nreport(row('toy'))")
    assert (ended.value["state"], ended.value["reason"]) == (
        "drifted",
        "the probe says: no answer: run `ultra-patches verify toy`",
    )
    assert ended.stderr.count("toy is drifted") == 1


def test_a_probe_that_raises_is_drifted_and_the_import_goes_on(vllm: Site) -> None:
    vllm.declare("toy = declare('toy', (META, 'f'), probe=lambda: 1 / 0, probe_after=(META,))", "toy")
    row, value = vllm.ask(f"import ultra_patches, {META} as meta\nreport([row('toy'), meta.f()])")
    assert (row["state"], value) == ("drifted", "upstream")
    assert "ZeroDivisionError" in row["reason"]


def test_late_it_is_applied_late_and_stays_so(vllm: Site) -> None:
    """The modules are there when the hooks are set, so the second hook finds the correction of the first."""
    vllm.write("user", f"from {META} import f\n")
    vllm.declare(PROBED, "toy")
    row, value = vllm.ask(f"import {LAYERWISE} as layerwise, user, ultra_patches\nreport([row('toy'), user.f()])")
    assert value == "corrected"
    assert (row["state"], row["rebound"]) == ("applied-late", 1)


@pytest.mark.parametrize("module", [META, LAYERWISE])
def test_a_reload_of_one_of_the_modules_leaves_it_applied(vllm: Site, module: str) -> None:
    vllm.declare(PROBED, "toy")
    row, value = vllm.ask(f"""
        import importlib, sys, ultra_patches, {META}, {LAYERWISE} as layerwise
        importlib.reload(sys.modules["{module}"])
        report([row("toy"), layerwise.load()])
    """)
    assert (row["state"], value) == ("applied", "corrected")


@pytest.mark.parametrize(("kept", "state"), [("DEFECT", "applied"), ("CLEAN", "not-needed")])
def test_a_verdict_of_verify_is_taken_instead(vllm: Site, kept: str, state: str) -> None:
    vllm.declare("toy = declare('toy', (META, 'f'))", "toy")
    vllm.ask(f"""
        from ultra_patches.core import evidence, verdicts
        from ultra_patches.core.ledger import entries
        from ultra_patches.patch import Verdict
        patch = entries["toy"].patch
        report(verdicts.keep(patch, evidence.sources_of(patch), Verdict.{kept}))
    """)
    assert vllm.ask(f"import ultra_patches, {META}\nreport(row('toy')['state'])") == state


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ("Finding(Verdict.CLEAN, 'all well')", "behaves well under the probe: all well"),
        ("Finding(Verdict.DEFECT, 'garbage')", "has the defect by the probe: garbage"),
        ("Finding(Verdict.INCONCLUSIVE, 'no idea')", "escapes the probe: no idea"),
        ("1 / 0", "the probe ends with ZeroDivisionError on it"),
    ],
)
def test_a_conflict_says_how_the_foreign_code_behaves(vllm: Site, result: str, said: str) -> None:
    vllm.declare(
        f"toy = declare('toy', (META, 'f'), probe=lambda: {result}, probe_after=(META,))\nknown('affected', toy)", "toy"
    )
    row = vllm.ask(f"import {META} as meta\nmeta.f = lambda: 'theirs'\nimport ultra_patches\nreport(row('toy'))")
    assert row["state"] == "conflict"
    assert said in row["reason"]


def test_a_probe_that_ends_its_process_is_drifted(vllm: Site) -> None:
    vllm.declare(
        "import os\n\ntoy = declare('toy', (META, 'f'), probe=lambda: os._exit(3), probe_after=(META,))", "toy"
    )
    row, value = vllm.ask(f"import ultra_patches, {META} as meta\nreport([row('toy'), meta.f()])")
    assert (row["state"], value) == ("drifted", "upstream")
    assert "the process ended with 3" in row["reason"]


def test_probes_that_do_not_end_are_ended(vllm: Site) -> None:
    vllm.declare(
        "import time\n\ntoy = declare('toy', (META, 'f'), probe=lambda: time.sleep(600), probe_after=(META,))", "toy"
    )
    verdict, detail = vllm.ask("""
        from ultra_patches.core import probing
        from ultra_patches.core.ledger import entries
        import ultra_patches
        finding = probing.ask([entries["toy"].patch], limit_s=1.5)["toy"].finding
        report([finding.verdict.value, finding.detail])
    """)
    assert (verdict, detail) == ("inconclusive", "no answer within 2 s")


def test_a_program_that_embeds_python_has_no_process_for_the_probe(vllm: Site) -> None:
    vllm.declare(PROBED, "toy")
    row = vllm.ask(f"import sys\nsys.executable = ''\nimport ultra_patches, {META}, {LAYERWISE}\nreport(row('toy'))")
    assert row["state"] == "drifted"
    assert "this program embeds Python" in row["reason"]


def test_a_conflict_is_not_probed_where_other_threads_run(vllm: Site) -> None:
    """The probe would have to run in this process, which alone has the foreign function."""
    vllm.declare(
        "toy = declare('toy', (META, 'f'), probe=lambda: 1 / 0, probe_after=(META,))\nknown('affected', toy)", "toy"
    )
    row = vllm.ask(f"""
        import threading, {META} as meta
        stop = threading.Event()
        threading.Thread(target=stop.wait).start()
        meta.f = lambda: 'theirs'
        import ultra_patches
        stop.set()
        report(row('toy'))
    """)
    assert row["state"] == "conflict"
    assert "`ultra-patches verify toy` says how it behaves" in row["reason"]


def test_a_conflict_names_verify_where_the_probe_cannot_run_here(vllm: Site) -> None:
    vllm.declare("toy = declare('toy', (META, 'f'))\nknown('affected', toy)", "toy")
    row = vllm.ask(f"import {META} as meta\nmeta.f = lambda: 'theirs'\nimport ultra_patches\nreport(row('toy'))")
    assert "`ultra-patches verify toy` says how it behaves" in row["reason"]
