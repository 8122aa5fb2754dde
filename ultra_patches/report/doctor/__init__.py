"""Why a patch might not reach a process: what the environment, the metadata and the live functions say of it.

Imports no upstream and no torch, so that a user's program can ask as well.
"""

from __future__ import annotations

import os
import pkgutil
import sys
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

from ultra_patches.core import lock, settings
from ultra_patches.core.discover import patches
from ultra_patches.core.evidence import decisions
from ultra_patches.core.facts import UPSTREAMS, locate
from ultra_patches.core.gate import Action
from ultra_patches.core.ledger import entries
from ultra_patches.report.doctor import caches, checks, facts
from ultra_patches.report.doctor.diagnosis import Diagnosis

__all__ = ["Diagnosis", "examine"]


def examine(environ: Mapping[str, str] | None = None, *, imports: bool = False) -> list[Diagnosis]:
    """Every finding of this process, problems first; with `imports` also those of fresh processes that import the targets."""
    env = os.environ if environ is None else environ
    upstreams = [upstream for name in UPSTREAMS if (upstream := locate(name))]
    vllm = any(upstream.name == "vllm" for upstream in upstreams)
    chosen = settings.read(entries, env)
    points = facts.entry_points()
    package = Path(__file__).parents[2]
    own = [m.name for m in pkgutil.iter_modules([str(package / "patches")]) if not m.name.startswith("_")]
    found: list[Iterable[Diagnosis]] = [checks.check_settings(chosen, entries, patches()[1])]
    if chosen.run_dir and chosen.run_dir.startswith("/"):
        found.append(checks.check_run_dir(chosen.run_dir, *facts.refused(chosen.run_dir)))
    found.append(checks.check_entry_points(facts.installed("ultra-patches"), points, own, package, vllm))
    if vllm:
        found.append(checks.check_plugins(env.get("VLLM_PLUGINS"), {p[1] for p in points if p[0].startswith("vllm.")}))
        modules = {module for e in entries.values() if e.patch.upstream == "vllm" for module in e.patch.modules}
        found.append(checks.check_model_runner(env.get("VLLM_USE_V2_MODEL_RUNNER"), modules))
        found.append(caches.check_caches(caches.root_of(env), caches.salts(chosen)))
        found.append(checks.check_ray(env) if "ray" in sys.modules or find_spec("ray") else [])
    for upstream in upstreams:
        claims = facts.installed(*UPSTREAMS[upstream.name][2])
        locked = lock.load().functions.get(upstream.name, {}).values()
        found.append(checks.check_upstream(upstream, claims, facts.copies(upstream)))
        found.append(checks.check_version(upstream, {r for digests in locked for rs in digests.values() for r in rs}))
        found.append(checks.check_record(upstream, facts.rewritten(upstream)))
    found.append(checks.check_process(facts.process(), "this process"))
    needed = (
        [one for one, decision in decisions(chosen).items() if decision.action is not Action.NOTHING] if imports else []
    )
    for name in sorted({entries[one].patch.upstream for one in needed}):
        found.append(checks.check_process(facts.fresh_process(name), f"a fresh process that imports {name}"))
    once: dict[tuple[str, str], Diagnosis] = {}
    for finding in chain.from_iterable(found):
        once.setdefault((finding.check, finding.what), finding)
    return sorted(once.values(), key=lambda finding: finding.severity != "problem")
