"""A Megatron LoRA checkpoint as a Hugging Face PEFT adapter, without Megatron and without a GPU.

    python -m examples.convert_lora CHECKPOINT BASE OUT
    python -m examples.convert_lora CHECKPOINT BASE OUT --verify MERGED

CHECKPOINT is what Megatron-Bridge or Megatron-Core wrote as torch_dist, by any number of ranks: only adapters, or a whole
model with them. Rank, alpha and dropout come from its run_config.yaml. BASE is the Hugging Face folder of the model that was
trained; sizes and names are its own. OUT must not exist, and appears whole or not at all.

Every adapter in the checkpoint is converted, or it is an error; `--skip PATTERN` leaves out names on purpose. Base weights and
optimizer states (`optimizer.…`, `chained_N.optimizer.…`) are no adapters and are left aside.

`--verify MERGED` merges what was written into BASE and compares with a merged export of Megatron's, tensor by tensor, before OUT
appears. `python -m examples.lora.verify ADAPTER BASE MERGED` does the same to a folder that is there.
"""

import argparse
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from examples.errors import RunError, reported
from examples.lora import base, checkpoint, cli, names, peft, settings, verify
from examples.lora.plan import plan

#: What `--skip` calls LoRA dropout after the adapter, which PEFT has before it only.
DROPOUT_POSITION = "dropout_position"


def convert(
    source: Path,
    base_folder: Path,
    out: Path,
    skip: Sequence[str] = (),
    merged: Path | None = None,
    tolerance: float | None = None,
) -> list[str]:
    """Write the adapter folder `out`; returns what there is to say, a line each.

    Raises:
        RunError: see the module's head; `out` is not there then, nor anything beside it.
    """
    _absent(out)
    verify.check_tolerance(tolerance)
    model = base.read(base_folder)
    stored = checkpoint.read(source)
    trained = settings.settings(stored.run_config)
    patterns = _without_dropout_position(skip, trained, stored)
    entries, skipped = names.adapters(stored, patterns)
    adapters = plan(entries, model, trained)
    with cli.progress("reading") as track:
        loaded = checkpoint.load(stored, entries, track)
    ranks = {adapter.module: adapter.rank for adapter in adapters}
    content = peft.config(ranks, trained, str(base_folder), model.modules)
    said = [f"{len(adapters)} modules from {len(entries)} tensors of {stored.folder}"]
    said += [f"{len(skipped)} names skipped: {', '.join(skipped)}"] if skipped else []
    with _appearing(out) as folder:
        peft.write(folder, ((one.module, *one.matrices(loaded)) for one in adapters), content)
        if merged is not None:
            with cli.progress("comparing") as track:
                said.append(str(verify.compare(folder, model, merged, tolerance, track)))
    return [*said, f"{out}: r {trained.rank}, alpha {trained.alpha}, dropout {trained.dropout}"]


def _without_dropout_position(
    skip: Sequence[str], trained: settings.Settings, stored: checkpoint.Checkpoint
) -> list[str]:
    if trained.dropout and trained.dropout_position != "pre" and DROPOUT_POSITION not in skip:
        raise RunError(
            f"{stored.run_config['file']}: peft.dropout_position is {trained.dropout_position!r}, PEFT drops LoRA's input only; "
            f"the weights are not affected: --skip {DROPOUT_POSITION} goes on"
        )
    return [pattern for pattern in skip if pattern != DROPOUT_POSITION]


def _absent(out: Path) -> None:
    # A rename would put it in place of an empty folder.
    if out.exists() or out.is_symlink():
        raise RunError(f"{out}: exists; remove it or give another folder")


@contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """A folder beside `out` that becomes it at the end, and is removed if anything fails."""
    try:
        partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise RunError(f"{out.parent}: cannot be written to ({error.strerror}); give another folder") from error
    try:
        # mkdtemp lets nobody else in.
        umask = os.umask(0)
        os.umask(umask)
        partial.chmod(0o777 & ~umask)
        yield partial
        _absent(out)
        partial.rename(out)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, (OSError, SafetensorError)):
            raise RunError(f"{out}: cannot be written ({getattr(error, 'strerror', None) or error})") from error
        raise


def main() -> int:
    """The command of the module's head."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.convert_lora",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="a torch_dist checkpoint, or a folder with iter_*"
    )
    parser.add_argument("base", type=Path, metavar="BASE", help="the Hugging Face folder of the base model")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write")
    parser.add_argument(
        "--skip", action="append", default=[], metavar="PATTERN", help="leave out names that match, e.g. 'mtp.*'"
    )
    parser.add_argument("--verify", type=Path, metavar="MERGED", help="compare with a merged export of Megatron's")
    parser.add_argument(
        "--tolerance",
        type=float,
        help=f"largest absolute difference (default {verify.TOLERANCE:g}, and a step of 16 bit)",
    )
    given = parser.parse_args()

    def work() -> None:
        for line in convert(given.checkpoint, given.base, given.out, given.skip, given.verify, given.tolerance):
            print(line)

    return reported(work)


if __name__ == "__main__":
    raise SystemExit(main())
