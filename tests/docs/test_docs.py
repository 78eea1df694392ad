"""Tests that links lead somewhere, public names and settings have an entry, and the README's code runs."""

import dataclasses
import functools
import importlib
import re
import runpy
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn

import quaver
from quaver.lab.cli import errors
from quaver.lab.settings import TrainConfig
from quaver.lab.settings.docs import format_configuration_page
from tests.isolated import Forked

REPOSITORY = Path(__file__).parents[2]
PAGES = [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")]
API = sorted((REPOSITORY / "docs" / "api").glob("*.md"))
LINK = re.compile(r"\]\(([^)\s]+)\)")
URLS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["urls"]


def strip_code(page: Path) -> str:
    """Return the page without its blocks and spans of code, where brackets are no links."""
    return re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def list_anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_somewhere(page):
    for link in LINK.findall(strip_code(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in list_anchors(target), link


def test_links_of_the_readme_lead_somewhere_on_a_package_index_too():
    """There relative links lead nowhere; a picture has to be the file itself, not the page that shows it."""
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", strip_code(REPOSITORY / "README.md"))
    assert len(links) == len(LINK.findall(strip_code(REPOSITORY / "README.md"))) > 10
    for picture, link in links:
        path = REPOSITORY / re.sub(r".*?/main/", "", link)
        kind = "raw" if picture else "tree" if path.is_dir() else "blob"
        assert link == f"{URLS['Homepage']}/{kind}/main/{path.relative_to(REPOSITORY)}"
        assert path.exists(), link


def test_the_code_of_the_readme_runs():
    code = re.findall(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert code
    process = Forked(exec, "\n".join(code), {"__name__": "__main__"}).finished()
    assert process.returncode == 0, process.stderr
    assert "2 of 2 matmul weights in float8" in process.stdout


def find_documented() -> dict[str, object]:
    """Return the objects that docs/api/ documents, by path."""
    paths = [path for page in API for path in re.findall(r"^<!-- api: (\S+) -->$", page.read_text(), re.MULTILINE)]
    # torchtitan and Lightning may be absent.
    return {path: find_object(path) for path in paths if not path.startswith("quaver.integrations.")}


def find_object(path: str) -> object:
    parts = path.split(".")
    for end in range(len(parts) - 1, 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        return functools.reduce(getattr, parts[end:], module)
    raise AssertionError(path)


IMPORT = re.compile(r"^[ +]*from (quaver(?:\.\w+)*) import (\([^)]*\)|[^\n#]*)", re.MULTILINE)


def test_imports_in_the_code_of_the_pages_resolve():
    paths = {
        f"{module}.{name}"
        for page in PAGES
        for module, names in IMPORT.findall(page.read_text(encoding="utf-8"))
        for name in re.findall(r"\w+", re.sub(r" as \w+", "", names))
        if not module.startswith(("quaver.integrations.torchtitan", "quaver.integrations.lightning"))  # may be absent
    }
    assert len(paths) > 30
    for path in paths:
        find_object(path)


@pytest.mark.parametrize("module", ["", ".optim", ".activations", ".export", ".numerics", ".distributed"])
def test_every_public_name_is_in_the_reference(module):
    public = importlib.import_module(f"quaver{module}")
    entries = {id(value) for value in find_documented().values()}
    assert [name for name in public.__all__ if id(getattr(public, name)) not in entries] == []


@pytest.mark.parametrize("page", API, ids=lambda page: page.stem)
def test_the_reference_has_the_docstrings(page):
    filled = runpy.run_path(str(REPOSITORY / "docs" / "site" / "api.py"))["filled"]
    text = page.read_text(encoding="utf-8")
    assert filled(text) == text, "run python docs/site/api.py"


def test_which_recipe_names_recipes_fields_and_public_names():
    page = (REPOSITORY / "docs" / "which-recipe.md").read_text()
    names = {*re.findall(r"`(?:quaver\.)?([a-z_0-9]+)[(`]", page)} - {"fnuz"}
    recipes = {recipe.value for recipe in quaver.Float8LinearRecipeName}
    fields = {field.name for cls in (quaver.Float8LinearConfig, quaver.CastConfig) for field in dataclasses.fields(cls)}
    assert {"rowwise", "tensorwise", "blockwise", "mxfp8", "delayed"} <= names
    assert names <= recipes | fields | {*quaver.__all__}


@pytest.mark.parametrize(("features", "converts"), [(1536, False), (1792, True)])
def test_which_recipe_says_from_which_size_float8_pays(features, converts):
    """The page: about 1,600 features at 8,192 tokens."""
    with torch.device("meta"):
        linear = nn.Linear(features, features)
    assert bool(quaver.auto_filter_for_recipe("rowwise", tokens=8192, device="H200")(linear, "")) is converts


def test_the_page_of_commands_has_the_exit_codes():
    documented = set(map(int, re.findall(r"^\| (\d+) \|", (REPOSITORY / "docs/commands.md").read_text(), re.M)))
    defined = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert documented == defined | {0, 1, 141}


def test_no_name_has_two_entries():
    values = [value for value in find_documented().values() if callable(value)]
    assert len({id(value) for value in values}) == len(values)


def test_every_page_is_in_the_navigation():
    listed = re.findall(r"^ +- (?:[^:\n]+: )?(\S+\.md)$", (REPOSITORY / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = [str(page.relative_to(REPOSITORY / "docs")) for page in (REPOSITORY / "docs").rglob("*.md")]
    assert sorted(listed) == sorted([*pages, "index.md"])


LAYOUT = (REPOSITORY / "docs" / "layout.md").read_text(encoding="utf-8")


def test_the_page_of_the_layout_has_the_folders_in_the_order_of_the_layers():
    rows = [re.findall(r"`(\w+)(?:/|\.py)`", row) for row in re.findall(r"^\| (`\w+/`[^|]*) \|", LAYOUT, re.MULTILINE)]
    contracts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [sorted(layer.split(" | ")) for contract in contracts[:2] for layer in contract["layers"]]
    assert [["__main__"], ["lab"], *(sorted({*row} - {"csrc"}) for row in rows)] == layers


@pytest.mark.parametrize(("file", "names"), re.findall(r"^\| `([\w/]+\.py)` \| ([^|]+) \|", LAYOUT, re.MULTILINE))
def test_the_page_of_the_layout_names_existing_objects(file, names):
    module = importlib.import_module(f"quaver.{file.removesuffix('.py').replace('/', '.')}")
    for name in re.findall(r"`([\w.]+)`", names):
        assert functools.reduce(getattr, name.split("."), module), name


def test_the_page_of_settings_is_what_the_dataclasses_say():
    """If this fails: python -m quaver.lab.settings.docs docs/configuration.md"""
    page = format_configuration_page()
    assert (REPOSITORY / "docs" / "configuration.md").read_text() == page
    config = TrainConfig()
    for section in dataclasses.fields(config):
        assert f"## [{section.name}]" in page
        for setting in dataclasses.fields(getattr(config, section.name)):
            rows = page.split(f"## [{section.name}]")[1].split("## [")[0].splitlines()
            (row,) = (line for line in rows if line.startswith(f"`{setting.name}` |"))
            assert len(row.split("|")[2].strip()) > 10, f"{section.name}.{setting.name} has no help"
