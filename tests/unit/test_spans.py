"""Releases as ranges."""

from ultra_patches.report.spans import spans


def test_spans() -> None:
    order = ("1", "2", "3", "4", "5")
    assert spans(order, ["5", "2", "1", "3"]) == "1 to 3, 5"
    assert spans(order, []) == ""
