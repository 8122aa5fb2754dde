"""Put a model and its data on every node of a Ray cluster, and check what is there.

    python -m examples.nemotron_ultra.stage --model REPO_OR_FOLDER --to FOLDER [--mirror FOLDER] [--data FILE_OR_FOLDER]

The model goes to FOLDER/model, the data to FOLDER/data. The command can be repeated: files that are right are not touched, one that
is absent, cut short or altered is fetched alone. With a mirror nothing leaves the cluster.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.console import Console
from rich.table import Table

from examples.errors import RunError, first_line, reported
from examples.nemotron_ultra import gsm8k, manifest
from examples.nemotron_ultra.cluster_ready import answers
from examples.nemotron_ultra.place import Contents, Hub, Mirror, Part, Placed, place
from ultra_patches.entrypoints.ray import runtime_env

#: How many files are named rather than counted.
FEW = 4
#: A node's name in the table, its Ray id, and what became of it.
Outcome = tuple[str, "Placed | RunError"]


def parts(options: argparse.Namespace) -> list[Part]:
    """What goes to every node."""
    found = [_model(options)]
    if options.data:
        contents = gsm8k.collect(options.data)
        files = [manifest.of_bytes(name, content) for name, content in contents.items()]
        found.append(Part("data", files, Contents(contents)))
    return found


def _model(options: argparse.Namespace) -> Part:
    folder = Path(options.model)
    if options.mirror:
        folder = options.mirror / options.model
        if not folder.is_dir():
            raise RunError(f"--mirror: no folder {folder}: put the files of {options.model} there")
    if folder.is_dir():
        folder = folder.resolve()
        return Part("model", manifest.of_folder(folder, options.threads), Mirror(folder))
    files, commit = manifest.of_hub(options.model, options.revision)
    return Part("model", files, Hub(options.model, commit))


def nodes(wanted: str) -> dict[str, str]:
    """Ray's id of every node that is alive, or of those whose addresses are named, to what it is called."""
    alive = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    if wanted != "all":
        names = wanted.split(",")
        if absent := sorted(set(names) - set(alive.values())):
            raise RunError(f"--nodes: {absent[0]} is none of {', '.join(sorted(set(alive.values())))}")
        alive = {node: address for node, address in alive.items() if address in names}
    return {node: f"{address} ({node[:8]})" for node, address in sorted(alive.items(), key=lambda item: item[::-1])}


@ray.remote(num_cpus=0, max_retries=0)
def _stage(what: list[Part], target: str, threads: int) -> "Placed | str":
    """On a node. What the user can mend comes back as text, so that Ray puts no traceback around it."""
    try:
        return place(what, Path(target), threads)
    except RunError as error:
        return str(error)


def on_nodes(what: list[Part], target: str, threads: int, places: dict[str, str]) -> list[Outcome]:
    """Stage on all nodes at once and wait for all: one that fails does not stop the others."""
    shared = ray.put(what)
    calls = {
        name: _stage.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
            shared, target.replace("{node}", node[:8]), threads
        )
        for node, name in places.items()
    }
    return [(name, _outcome(call)) for name, call in calls.items()]


def _outcome(call: Any) -> "Placed | RunError":
    try:
        found = ray.get(call)
    except ray.exceptions.RayTaskError as error:
        return RunError(f"failed: {type(error.cause).__name__}: {first_line(error.cause)}")
    except ray.exceptions.RayError as error:
        return RunError(
            f"died while it staged ({type(error).__name__}): bring the node back and repeat the command, which goes on there"
        )
    return RunError(found) if isinstance(found, str) else found


def disagreement(outcomes: Sequence[Outcome]) -> str | None:
    """Where nodes have not the same files: who, and what to remove."""
    placed = [(name, found) for name, found in outcomes if isinstance(found, Placed)]
    if len({found.digest for _, found in placed}) <= 1:
        return None
    common = set.intersection(*(set(found.extra) for _, found in placed))
    name, extra = next((name, extra) for name, found in placed if (extra := sorted(set(found.extra) - common)))
    return f"nodes disagree: {name} also has {', '.join(extra[:3])}, which the model has not: remove it there"


def show(outcomes: Sequence[Outcome]) -> None:
    """A row a node, and under them the files that were put in place, where they are few."""
    table = Table("node", "files right", "put in place", "bytes written", box=None)
    for name, found in outcomes:
        if isinstance(found, Placed):
            table.add_row(name, str(len(found.right)), str(len(found.repaired)), f"{found.written:,}")
        else:
            table.add_row(name, "-", "failed", "-")
    Console(soft_wrap=True).print(table)
    for name, found in outcomes:
        if isinstance(found, Placed) and 0 < len(found.repaired) <= FEW:
            print(f"{name}: put in place {', '.join(found.repaired)}")


def stage(options: argparse.Namespace) -> None:
    """Everything. RunError has a line for each node that failed."""
    if not Path(options.to).is_absolute():
        raise RunError(f"--to {options.to}: give an absolute path, for each node has its own working directory")
    if options.threads < 1:
        raise RunError(f"--threads {options.threads}: at least one is needed")
    what = parts(options)
    total = sum(file.size for part in what for file in part.files)
    _connect(options.ray)
    try:
        places = nodes(options.nodes)
        count = sum(len(part.files) for part in what)
        print(f"{count} files, {total:,} bytes, to {options.to} on {len(places)} nodes", flush=True)
        outcomes = on_nodes(what, options.to, options.threads, places)
    finally:
        ray.shutdown()
    show(outcomes)
    failed = [f"{name}: {found}" for name, found in outcomes if isinstance(found, RunError)]
    if unlike := disagreement(outcomes):
        failed.append(unlike)
    if failed:
        raise RunError(*failed)


def _connect(ray_address: str) -> None:
    address = os.environ.get("RAY_ADDRESS") or ray_address if ray_address == "auto" else ray_address
    absent = RunError(f"--ray {ray_address}: no cluster there: start one with `ray start`, or say --ray local")
    if address not in {"auto", "local"} and "//" not in address and not answers(address):
        raise absent
    try:
        ray.init(address, runtime_env=runtime_env({}), log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise absent from error


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where every node has every file, 1 with one line on stderr for each that has not."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True, help="a repository of the Hugging Face Hub, or a folder on all nodes")
    parser.add_argument("--to", required=True, help="an absolute path; {node} in it becomes a part of Ray's node id")
    parser.add_argument(
        "--mirror", type=Path, help="a folder on all nodes that holds the repository as MIRROR/OWNER/NAME"
    )
    parser.add_argument("--revision", help="a branch, tag or commit of the repository")
    parser.add_argument("--data", type=Path, help="GSM8K: a train or test file (.jsonl, .parquet) or a folder of them")
    parser.add_argument("--nodes", default="all", help="all, or addresses of nodes separated by commas")
    parser.add_argument("--ray", default="auto", help="the address of a cluster, auto, or local to start Ray here")
    parser.add_argument("--threads", type=int, default=min(8, os.cpu_count() or 1), help="files at a time on a node")
    options = parser.parse_args(arguments)
    return reported(lambda: stage(options))


if __name__ == "__main__":
    raise SystemExit(main())
