"""The table of docs/integrations.md says what the tests of this folder prove, and nothing else."""

from tests.library.third_party import table


def test_the_page_has_the_table_of_the_tests():
    page = table.PAGE.read_text()
    assert table.find_table(page) == table.write_table(), "run python -m tests.library.third_party.table"
