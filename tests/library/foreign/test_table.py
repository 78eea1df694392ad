"""The table of docs/integrations.md says what the tests of this folder prove, and nothing else."""

import pytest

from tests.library.foreign import table


def test_the_page_has_the_table_of_the_tests():
    assert table.on_the_page(table.PAGE.read_text()) == table.table(), "run python -m tests.library.foreign.table"


def test_a_mark_outside_of_the_table_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "test_new.py").write_text('@proves("Keras", "train")\ndef test_new(): ...\n')
    monkeypatch.setattr(table, "FOLDER", tmp_path)
    with pytest.raises(ValueError, match="no row Keras"):
        table.table()


def test_a_feature_may_work_and_be_refused_in_part(tmp_path, monkeypatch):
    (tmp_path / "test_new.py").write_text(
        '@proves("Accelerate", "DDP")\ndef test_a(): ...\n@refuses("Accelerate", "DDP", "no.")\ndef test_b(): ...\n'
    )
    monkeypatch.setattr(table, "FOLDER", tmp_path)
    assert "| DDP | – | – | – | works, refused (1) | – |" in table.table()
    assert table.table().endswith("\n1. Accelerate, DDP: no.\n")


def test_what_a_library_lacks_is_told_apart_from_what_no_test_shows(tmp_path, monkeypatch):
    (tmp_path / "test_new.py").write_text('lacks("Fabric", "merge", "heads", sentence="no.")\n')
    monkeypatch.setattr(table, "FOLDER", tmp_path)
    assert "| merge | – | – | – | – | – | – | (1) |" in table.table()
    assert table.table().endswith("\n1. Fabric: no.\n")
    (tmp_path / "test_other.py").write_text('@proves("Fabric", "merge")\ndef test_a(): ...\n')
    with pytest.raises(ValueError, match="Fabric is marked both as lacking merge and as proved"):
        table.table()
