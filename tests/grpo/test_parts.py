"""The parts of the GRPO example that need no model: the arithmetic, the data, checkpoints and the diagnosis."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from examples.errors import RunError  # noqa: E402 # as above
from examples.grpo import checkpoint, data, diagnose, grpo  # noqa: E402 # torch may be absent


@given(st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=4, max_size=4), min_size=1, max_size=6))
def test_advantages_are_normalised_within_each_group(groups: list[list[float]]) -> None:
    found = grpo.advantages(torch.tensor(groups).view(-1), 4).view(-1, 4)
    for rewards, row in zip(groups, found, strict=True):
        if len(set(rewards)) == 1:
            assert row.tolist() == [0.0] * 4
        else:
            assert row.mean().item() == pytest.approx(0, abs=1e-5)
            assert row.std().item() == pytest.approx(1, abs=1e-3)
            assert row.argsort(stable=True).tolist() == torch.tensor(rewards).argsort(stable=True).tolist()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 1.0, -1.0, False),
        (1.5, 1.0, -1.2, True),
        (0.5, 1.0, -0.5, False),
        (0.5, -1.0, 0.8, True),
        (1.5, -1.0, 1.5, False),
    ],
)
def test_the_objective_is_clipped_where_it_would_gain(
    ratio: float, advantage: float, loss: float, clipped: bool
) -> None:
    new = torch.tensor([[math.log(ratio)]])
    found, where = grpo.objective(new, torch.zeros(1, 1), torch.tensor([advantage]), 0.2, 0.2, None, 0.0)
    assert found.item() == pytest.approx(loss)
    assert where.item() is clipped


def test_the_gradient_raises_what_is_better_than_its_group_and_the_penalty_pulls_to_the_reference() -> None:
    new = torch.zeros(2, 1, requires_grad=True)
    loss, _ = grpo.objective(new, torch.zeros(2, 1), torch.tensor([1.0, -1.0]), 0.2, 0.2, None, 0.0)
    loss.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == [[-1.0], [1.0]]
    near = torch.tensor([[0.5]], requires_grad=True)
    loss, _ = grpo.objective(near, near.detach(), torch.zeros(1), 0.2, 0.2, torch.zeros(1, 1), 2.0)
    loss.sum().backward()
    assert near.grad is not None
    assert near.grad.item() == pytest.approx(2.0 * (1 - math.exp(-0.5)))


def test_padding_marks_exactly_the_response() -> None:
    batch = data.pad([[5, 6], [5]], [[7], [8, 9, 1]], multiple=8, rows=4)
    assert batch["tokens"].shape == (4, 8)
    assert batch["mask"].shape == (4, 7)
    assert [torch.nonzero(row)[:, 0].tolist() for row in batch["mask"]] == [[1], [0, 1, 2], [], []]
    assert batch["tokens"][1].tolist() == [5, 8, 9, 1, 0, 0, 0, 0]


@given(st.integers(1, 9), st.integers(1, 5), st.integers(0, 99))
def test_each_epoch_has_every_problem_once(size: int, count: int, seed: int) -> None:
    problems = [data.Problem(str(index), "#### 1") for index in range(size)]
    drawn = [problem for step in range(2 * size) for problem in data.draw(problems, count, step, seed)]
    for epoch in range(len(drawn) // size):
        assert sorted(p.question for p in drawn[epoch * size : (epoch + 1) * size]) == sorted(map(str, range(size)))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("not json\n", "line 1: JSONDecodeError"),
        ('{"question": "a", "answer": "#### 1"}\n{"question": "b"}\n', "line 2: KeyError: 'answer'"),
        ('{"question": "a", "answer": "none"}\n', "line 1: ValueError"),
        ("", "no lines"),
    ],
)
def test_a_dataset_that_is_none_names_the_line(tmp_path: Path, text: str, wanted: str) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(RunError, match=wanted):
        data.load(tmp_path / "a.jsonl")


def test_a_checkpoint_is_whole_or_absent(tmp_path: Path) -> None:
    for step in (0, 10, 20):
        checkpoint.partial(tmp_path, step).mkdir()
        assert step not in checkpoint.saved(tmp_path)
        checkpoint.complete(tmp_path, step, keep=2)
    (checkpoint.partial(tmp_path, 30) / "left").mkdir(parents=True)
    assert checkpoint.saved(tmp_path) == [10, 20]
    assert not checkpoint.partial(tmp_path, 30).exists()


def test_the_diagnosis_names_the_layers_in_their_order() -> None:
    synced = [{"layers.10.w": "a", "layers.2.w": "b", "norm": "c"}]
    assert diagnose.differing(synced, [{"layers.10.w": "x", "layers.2.w": "y", "norm": "c"}]) == [
        "layers.2.w",
        "layers.10.w",
    ]
    assert "layers.2.w" in diagnose.explain(1.0, 0.05, ["layers.2.w"], 0.01)
    assert "compute differently" in diagnose.explain(1.0, 0.05, [], 0.9)
    nan = diagnose.mean_difference(torch.tensor([[math.nan]]), torch.zeros(1, 1), torch.ones(1, 1))
    assert not nan <= 0.05


def test_the_preset_is_the_same_for_the_same_seed(tmp_path: Path) -> None:
    import random

    from examples.grpo import cpu_preset

    first, second = (cpu_preset.problems(random.Random(3)) for _ in range(2))
    assert first == second
    assert len({json.dumps(problem) for problem in first}) == 300
    for problem in first:
        wrong = cpu_preset.spoiled(problem, random.Random(1))
        assert wrong["question"] == problem["question"]
