"""Tests replace_file."""

import pytest

from quaver.runtime.files import replace_file


@pytest.mark.parametrize("exists", [True, False])
def test_a_symlink_stays_one_and_its_target_is_replaced(tmp_path, exists):
    target, link = tmp_path / "elsewhere" / "0123", tmp_path / "plot.png"
    target.parent.mkdir()
    if exists:
        target.write_text("old")
    link.symlink_to(target)
    with replace_file(link) as partial:
        assert (partial.parent, partial.suffix) == (target.parent, ".png")
        partial.write_text("new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert [file.name for file in target.parent.iterdir()] == ["0123"]
