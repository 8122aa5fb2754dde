"""What the processes of a test run make once for all of them."""

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
