"""What a run shows and leaves: a line in the terminal, `metrics.jsonl`, TensorBoard, and `run.png` at the end."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

#: What the picture shows: a panel a line, its unit, and the metrics in it.
PANELS = (
    ("reward", "mean reward", ("reward", "eval")),
    ("grad norm", "L2 norm before clipping", ("grad_norm",)),
    ("sync time", "seconds", ("sync_s",)),
    ("trainer - rollout", "mean |dlogp|, nats", ("dlogp_before", "dlogp_after", "dlogp_rollout")),
)
METRICS = "metrics.jsonl"
SHOWN = ("reward", "eval", "loss", "grad_norm", "dlogp_before", "dlogp_after", "sync_s")


class Report:
    """Writes each step's metrics everywhere at once; a context manager around the run."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.console = folder, Console(stderr=True)
        torn = _mend(folder / METRICS)
        self.lines = (folder / METRICS).open("a", buffering=1)
        self.board = SummaryWriter(str(folder / "tensorboard"))
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.progress = Progress(*columns, TextColumn("{task.fields[last]}"), console=self.console)
        self.tasks: dict[str, Any] = {}
        if torn:
            self.say(
                f"{folder / METRICS}: {len(torn)} lines are no step, line {torn[0]} for one, as a run leaves that is killed or has no "
                "room: they are passed over"
            )

    def __enter__(self) -> "Report":
        self.progress.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Close everything. Where the run has failed its own error is the one to be told, not that of a file that is closed."""
        self.progress.stop()
        for one in (self.board, self.lines):
            try:
                one.close()
            except OSError:
                if kind is None:
                    raise

    def say(self, text: str) -> None:
        """A line above the progress bars."""
        self.progress.console.print(text, highlight=False)

    def step(self, phase: str, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        """Record one step; where there is no terminal a line takes the place of the bar."""
        self.lines.write(json.dumps({"phase": phase, "step": step, **metrics}) + "\n")
        for name, value in metrics.items():
            self.board.add_scalar(f"{phase}/{name}", value, step)
        self.board.flush()
        last = "  ".join(f"{name} {metrics[name]:.4g}" for name in SHOWN if name in metrics)
        if phase not in self.tasks:
            self.tasks[phase] = self.progress.add_task(phase, total=steps, last="")
        self.progress.update(self.tasks[phase], completed=step + 1, last=last)
        if not self.console.is_terminal and (phase == "grpo" or step % 50 == 0):
            self.say(f"{phase} {step + 1}/{steps}  {last}")


def read(folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run, one entry a step; of a step that ran twice, because of a resume, the later one.

    A line that is no step, as a run leaves that was killed while it wrote, is passed over.
    """
    rows = [row for row in map(_row, _lines(folder / METRICS)) if row is not None]
    return list({(row["phase"], row["step"]): row for row in rows}.values())


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines() if path.is_file() else []


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_step = isinstance(row, dict) and isinstance(row.get("phase"), str) and type(row.get("step")) is int
    return row if is_step and all(isinstance(row[name], (int, float)) for name in row if name != "phase") else None


def _mend(path: Path) -> list[int]:
    """Which lines are no step, by number. A last one without its end gets it, or the next step would be lost with it."""
    lines = _lines(path)
    if lines and not path.read_bytes().endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")
    return [number for number, line in enumerate(lines, 1) if _row(line) is None]


def draw(folder: Path) -> Path:
    """Draw `run.png` from `metrics.jsonl`; returns its path."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    rows = sorted((row for row in read(folder) if row["phase"] == "grpo"), key=lambda row: row["step"])
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7), constrained_layout=True)
    for axis, (title, unit, names) in zip(axes.flat, PANELS, strict=True):
        for name in names:
            points = [(row["step"] + 1, row[name]) for row in rows if name in row]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", markersize=3, linewidth=1.2, label=name)
        axis.set(title=title, xlabel="GRPO step", ylabel=unit)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        if len(names) > 1 and axis.lines:
            axis.legend()
    path = folder / "run.png"
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
