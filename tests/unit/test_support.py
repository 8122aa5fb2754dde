"""What the processes of a test run make once for all of them."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support import once


def test_a_folder_is_made_once_for_all_that_ask_at_a_time(tmp_path_factory: pytest.TempPathFactory) -> None:
    made: list[Path] = []

    def make(folder: Path) -> None:
        folder.mkdir()
        made.append(folder)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: once(tmp_path_factory, "asked-for-by-four", make), range(4)))
    assert made == found[:1]
    assert set(found) == {found[0]}


def test_what_failed_in_one_process_is_not_tried_in_another(tmp_path_factory: pytest.TempPathFactory) -> None:
    def make(folder: Path) -> None:
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        once(tmp_path_factory, "not-to-be-made", make)
    with pytest.raises(pytest.fail.Exception, match=r"not-to-be-made could not be made: OSError\('no room'\)"):
        once(tmp_path_factory, "not-to-be-made", Path.mkdir)


def test_tests_of_one_group_run_in_one_process(tmp_path: Path) -> None:
    """Or each process would repeat what the group shares: pytest 9.2 hid the groups from xdist 3.8."""
    (tmp_path / "test_groups.py").write_text(
        "import os, pathlib, pytest\n"
        "@pytest.mark.parametrize('number', range(24))\n"
        "@pytest.mark.parametrize('group', ['one', 'two'])\n"
        "def test(group, number):\n"
        "    with pathlib.Path(group).open('a') as file:\n"
        "        print(os.environ['PYTEST_XDIST_WORKER'], file=file)\n"
    )
    (tmp_path / "conftest.py").write_text(
        "import pytest\n"
        "@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_collection_modifyitems(items):\n"
        "    for item in items:\n"
        "        item.add_marker(pytest.mark.xdist_group(item.callspec.params['group']))\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
    for group in ("one", "two"):
        assert len(set((tmp_path / group).read_text().split())) == 1
