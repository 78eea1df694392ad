"""docs/configuration.md has every setting of `quaver train`, with its help."""

from dataclasses import fields
from pathlib import Path

from quaver.lab.settings import TrainConfig
from quaver.lab.settings.docs import format_configuration_page

ROOT = Path(__file__).parents[2]


def test_the_page_of_settings_is_what_the_dataclasses_say():
    """If this fails: python -m quaver.lab.settings.docs docs/configuration.md"""
    page = format_configuration_page()
    assert (ROOT / "docs" / "configuration.md").read_text() == page
    config = TrainConfig()
    for section in fields(config):
        assert f"## [{section.name}]" in page
        for setting in fields(getattr(config, section.name)):
            rows = page.split(f"## [{section.name}]")[1].split("## [")[0].splitlines()
            (row,) = (line for line in rows if line.startswith(f"`{setting.name}` |"))
            assert len(row.split("|")[2].strip()) > 10, f"{section.name}.{setting.name} has no help"
