"""The README and the pages of docs/: their snippets run as pasted, their links lead somewhere, the API page is fresh."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MOST_WORDS = 1_300  # of the README, with its tables


@pytest.mark.parametrize("document", ["README.md", "docs/package.md"])
def test_the_snippet_runs_as_pasted(document, tmp_path):
    snippets = PYTHON.findall((ROOT / document).read_text(encoding="utf-8"))
    assert len(snippets) == 1
    (tmp_path / "snippet.py").write_text(snippets[0])
    names = runpy.run_path(str(tmp_path / "snippet.py"))
    assert names["q"].grad.isfinite().all() and names["q"].grad.any()


def test_the_readme_stays_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= MOST_WORDS


def test_the_package_page_has_no_link_that_only_the_repository_can_follow():
    """An index shows docs/package.md without the files beside it."""
    assert 'readme = "docs/package.md"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / "docs" / "package.md").read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link] == []
