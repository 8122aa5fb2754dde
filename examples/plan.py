"""Plan memory and layout before a GPU is asked for: what Megatron and vLLM would hold on each, and what does not divide.

    python -m examples.plan CONFIG.json --nodes 8 --gpus-per-node 8 --gpu h200 --tp 8 --pp 4 --ep 16 --vllm-tp 8 --vllm-pp 4 --colocated
    python -m examples.plan --driver CONFIG.yaml --gpu h200

CONFIG.json is a model's config.json as on Hugging Face, CONFIG.yaml a configuration of `examples.grpo`. Exit status 0: the
layout fits; 1: it does not divide or not fit, or the input is wrong. GiB are 2^30 bytes.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from examples.errors import RunError
from examples.planning import driver
from examples.planning.layout import GPU_MIB, ULTRA_TARGETS, Layout, Lora, Rollout, Sync, Trainer
from examples.planning.model import Model, read
from examples.planning.plan import GIB, Plan, plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the plan; 0 where it fits, else 1."""
    options = _parser().parse_args(arguments)
    try:
        model, layout = _input(options)
        made = plan(model, layout)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(as_dict(model, layout, made), indent=1))
    else:
        show(model, layout, made)
    return 0 if made.verdict == "fits" else 1


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number from 1 on")
    return int(text)


#: Sizes that a driver's configuration has, and their defaults without one.
SIZES = {
    "nodes": 1,
    "rollout-nodes": 0,
    "tp": 1,
    "pp": 1,
    "ep": 1,
    "etp": 1,
    "vllm-tp": 1,
    "vllm-pp": 1,
    "buffer-mib": 512,
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m examples.plan", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "model", nargs="?", type=Path, metavar="CONFIG.json", help="the model; with --driver, in place of its"
    )
    parser.add_argument(
        "--driver", type=Path, metavar="CONFIG.yaml", help="take sizes and LoRA from a configuration of examples.grpo"
    )
    for name, default in SIZES.items():
        note = (
            "nodes of the rollout alone, out of --nodes; the others train"
            if name == "rollout-nodes"
            else f"default {default}"
        )
        parser.add_argument(f"--{name}", type=_positive, help=note)
    parser.add_argument("--gpus-per-node", type=_positive, default=8)
    parser.add_argument("--gpu", choices=sorted(GPU_MIB), default="h200")
    parser.add_argument("--gpu-mib", type=_positive, help="memory of another GPU")
    parser.add_argument(
        "--reserve-gib", type=float, default=8.0, help="to be left for activations, KV cache, CUDA; default 8"
    )
    parser.add_argument("--colocated", action="store_true", help="trainer and vLLM on the same GPUs")
    parser.add_argument("--vllm-ep", action="store_true", help="vLLM's enable_expert_parallel")
    parser.add_argument("--vllm-sleep", action="store_true", help="vLLM's weights leave the GPU in training")
    parser.add_argument(
        "--offload-for-rollout", action="store_true", help="gradients and optimizer leave it in rollout and sync"
    )
    parser.add_argument(
        "--optimizer-on-host", action="store_true", help="Megatron's optimizer_cpu_offload, of all of it"
    )
    parser.add_argument("--grad-bytes", type=int, choices=(2, 4), default=4, help="2 without grad_reduce_in_fp32")
    parser.add_argument("--moment-bytes", type=int, choices=(1, 2, 4), default=4, help="of Adam's moments, each")
    parser.add_argument("--pad-vocab", action="store_true", help="the provider's should_pad_vocab")
    parser.add_argument("--lora-dim", type=_positive, help="train LoRA of that dim; the model is frozen")
    parser.add_argument("--lora-targets", default=",".join(ULTRA_TARGETS), help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print everything in bytes, as JSON")
    return parser


def _input(options: argparse.Namespace) -> tuple[Model, Layout]:
    sizes = {name: getattr(options, name.replace("-", "_")) for name in SIZES}
    if options.driver:
        if given := [f"--{name}" for name, value in sizes.items() if value is not None]:
            raise RunError(f"{given[0]} comes from {options.driver}: change it there, or leave out --driver")
        found, trainer, rollout, sync = driver.read(options.driver)
        path = options.model or found
    elif options.model is None:
        raise RunError(
            "no model: give a config.json as on Hugging Face, or --driver with a configuration of examples.grpo"
        )
    else:
        path = options.model
        trainer, rollout, sync = _layout(options, {name: value or SIZES[name] for name, value in sizes.items()})
    trainer = replace(
        trainer,
        optimizer_on_host=options.optimizer_on_host or trainer.optimizer_on_host,
        offload_for_rollout=options.offload_for_rollout,
        grad_bytes=options.grad_bytes,
        moment_bytes=options.moment_bytes,
        pad_vocab=options.pad_vocab or trainer.pad_vocab,
    )
    if options.lora_dim:
        trainer = replace(trainer, lora=Lora(options.lora_dim, tuple(filter(None, options.lora_targets.split(",")))))
    rollout = replace(rollout, sleep=options.vllm_sleep or rollout.sleep)
    memory = (options.gpu_mib or GPU_MIB[options.gpu]) << 20
    return read(path), Layout(trainer, rollout, sync, memory, options.gpus_per_node, int(options.reserve_gib * GIB))


def _layout(options: argparse.Namespace, sizes: dict[str, int]) -> tuple[Trainer, Rollout, Sync]:
    train_nodes = sizes["nodes"] - sizes["rollout-nodes"]
    if options.colocated and sizes["rollout-nodes"]:
        raise RunError("--rollout-nodes goes without --colocated: colocated, every node does both")
    if not options.colocated and not 0 < train_nodes < sizes["nodes"]:
        raise RunError(
            f"--nodes {sizes['nodes']} --rollout-nodes {sizes['rollout-nodes']}: leave nodes to both sides, or give --colocated"
        )
    per_node = options.gpus_per_node
    rollout_gpus = (sizes["nodes"] if options.colocated else sizes["rollout-nodes"]) * per_node
    return (
        Trainer(train_nodes * per_node, sizes["tp"], sizes["pp"], sizes["ep"], sizes["etp"]),
        Rollout(rollout_gpus, sizes["vllm-tp"], sizes["vllm-pp"], expert_parallel=options.vllm_ep),
        Sync("ipc" if options.colocated else "nccl", sizes["buffer-mib"]),
    )


def as_dict(model: Model, layout: Layout, made: Plan) -> dict[str, object]:
    """Everything as JSON holds it; bytes and elements."""
    return {
        "architecture": model.architecture,
        "layers": len(model.layers),
        "layout": asdict(layout),
        "parameters": made.parameters,
        "verdict": made.verdict,
        "reason": made.reason,
        "checks": [asdict(one) | {"holds": one.holds} for one in made.checks],
        "stages": [
            asdict(one) | {"layers": [one.layers.start, one.layers.stop], "parameters": one.parameters}
            for one in made.stages
        ],
        "engine_bytes": list(made.engine_bytes),
        "phases": [asdict(one) | {"total": one.total} for one in made.phases],
        "host": made.host,
    }


def show(model: Model, layout: Layout, made: Plan) -> None:
    """Tables on stdout, and the verdict as the last line."""
    console = Console(highlight=False, soft_wrap=True)
    trainer, rollout = layout.trainer, layout.rollout
    mtp = f", without {model.mtp_layers} of multi-token prediction" if model.mtp_layers else ""
    console.print(f"{model.architecture}: {made.parameters / 1e9:.2f}e9 parameters, {len(model.layers)} layers{mtp}")
    console.print(
        f"Megatron: {trainer.gpus} GPUs, TP {trainer.tp} PP {trainer.pp} EP {trainer.ep} ETP {trainer.etp}", end=""
    )
    if made.stages:
        console.print(f", DP {trainer.dp} dense, {trainer.expert_dp} experts", end="")
    console.print(
        f"; vLLM: {rollout.gpus} GPUs, TP {rollout.tp} PP {rollout.pp}"
        + (f" EP {rollout.ep}" if rollout.ep > 1 else "")
    )
    rules = Table("rule", "found", "choose")
    for one in made.checks:
        rules.add_row(escape(one.rule), one.found, f"[bold red]{escape(one.advice)}[/]" if one.advice else "")
    console.print(rules)
    if made.stages:
        _show_sizes(console, layout, made)
    color = "green" if made.verdict == "fits" else "bold red"
    console.print(f"[{color}]{made.verdict}[/]: {escape(made.reason)}")


def _show_sizes(console: Console, layout: Layout, made: Plan) -> None:
    ranks = Table(
        "rank of stage", "layers", "dense", "experts", "adapters", title="parameters, 1e9", title_justify="left"
    )
    for stage in made.stages:
        numbers = (f"{number / 1e9:.3f}" for number in (stage.dense, stage.experts, stage.adapters))
        ranks.add_row(f"stage {stage.index}", f"{stage.layers.start}-{stage.layers.stop - 1}", *numbers)
    console.print(ranks)
    twice = [phase.name for phase in made.phases].count("sync") > 1
    heads = (f"sync, {phase.gpu}" if twice and phase.name == "sync" else phase.name for phase in made.phases)
    table = Table("GiB a GPU", *(Column(head, justify="right") for head in heads))
    for name in dict.fromkeys(name for phase in made.phases for name in phase.parts):
        table.add_row(name, *(f"{phase.parts[name] / GIB:.1f}" if name in phase.parts else "" for phase in made.phases))
    table.add_section()
    table.add_row("total", *(f"{phase.total / GIB:.1f}" for phase in made.phases))
    table.add_row("left", *(f"{(layout.memory - phase.total) / GIB:.1f}" for phase in made.phases))
    console.print(table)
    if made.host:
        console.print(
            f"host memory: {made.host * layout.gpus_per_node / GIB:.0f} GiB a node, {made.host / GIB:.1f} a GPU"
        )


if __name__ == "__main__":
    raise SystemExit(main())
