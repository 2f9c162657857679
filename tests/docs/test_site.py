"""The documentation as a site: a link or an anchor that leads nowhere is an error, there and in pages of the root."""

import shutil
from pathlib import Path

import pytest

pytest.importorskip("material", reason="needs the extra 'docs'; `make docs`, which has it, refuses such links too")
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.exhaustive


def built(root, out):
    build(load_config(str(root / "mkdocs.yml"), strict=True, site_dir=str(out)))


@pytest.fixture
def checkout(tmp_path):
    """Copy the sources of the site, for a test to change."""
    copy = tmp_path / "checkout"
    ignored = shutil.ignore_patterns("build", ".venv", ".git", "tests", "csrc", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, copy, ignore=ignored)
    return copy


def test_links_that_lead_nowhere_are_errors(checkout, tmp_path):
    """To a heading from a page of the site, and to a page from one of the root."""
    broken = {"docs/start.md": "[x](models.md#no-such-heading)", "README.md": "[x](docs/no-such-page.md)"}
    for page, link in broken.items():
        with (checkout / page).open("a") as file:
            file.write(f"\n{link}\n")
    with pytest.raises(Abort, match="2 warnings in strict mode"):
        built(checkout, tmp_path / "site")


def test_the_site_has_a_version_and_the_pages_of_the_root(tmp_path):
    built(ROOT, tmp_path)
    (version,) = tmp_path.iterdir()
    for page in ("index.html", "start/index.html", "changelog/index.html", "bench/index.html"):
        assert f"chunkrt {version.name}" in (version / page).read_text()
