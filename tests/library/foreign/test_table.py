"""The table of docs/integrations.md says what the tests of this folder prove, and nothing else."""

import pytest

from tests.library.foreign import table


@pytest.fixture
def write_test(tmp_path, monkeypatch):
    """Return a function that writes a test file, of which alone the table is then made."""
    monkeypatch.setattr(table, "FOLDER", tmp_path)
    return (tmp_path / "test_new.py").write_text


def test_the_page_has_the_table_of_the_tests():
    page = table.PAGE.read_text()
    assert table.find_table(page) == table.write_table(), "run python -m tests.library.foreign.table"


@pytest.mark.parametrize(
    ("library", "feature", "message"),
    [
        ("Keras", "train", "no row Keras"),
        ("Fabric", "taxes", r"column \['taxes'\]"),
        ("Fabric", "merge", "Fabric is marked both as lacking merge and as proved"),
    ],
)
def test_a_mark_that_does_not_fit_the_table_is_an_error(library, feature, message, write_test):
    write_test(f'@proves("{library}", "{feature}")\ndef test_new(): ...\n')
    with pytest.raises(ValueError, match=message):
        table.write_table()


def test_what_is_proved_refused_lacked_or_unknown_is_told_apart(write_test):
    write_test(
        '@proves("Accelerate", "DDP")\ndef test_a(): ...\n@refuses("Accelerate", "DDP", "no.")\ndef test_b(): ...\n'
    )
    assert "| DDP | – | – | – | works, refused (1) | – |" in table.write_table()
    assert "| merge | (2) | (3) | – | (4) | (5) | (6) | (7) |" in table.write_table()
    assert "\n1. Accelerate, DDP: no.\n" in table.write_table()
    assert table.write_table().endswith("\n7. Fabric: the model and the loop are the user's.\n")
