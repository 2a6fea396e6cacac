"""The documentation is a site: it builds without a warning, has every page and name, and its links lead somewhere."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown.extensions.toc import slugify

from tests.exact.full import RESULT
from tests.test_docs import DOCS, PAGES, READ, ROOT, blocks


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built where a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    quiet = {"NO_MKDOCS_2_WARNING": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=os.environ | quiet, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return folder


@pytest.mark.full
def test_the_site_has_every_page(site: Path) -> None:
    for name in PAGES:
        page = Path(name).relative_to("docs").with_suffix("")
        assert (site / ("index.html" if page.name == "index" else page / "index.html")).is_file()


@pytest.mark.full
def test_the_reference_has_every_public_name_with_its_docstring(site: Path) -> None:
    html = (site / "api" / "index.html").read_text(encoding="utf-8")
    for name in re.findall(r"^::: megabatch\.(\S+)$", PAGES["docs/api.md"], re.MULTILINE):
        _, found, rest = html.partition(f'id="megabatch.{name}" class="doc doc-heading"')
        assert found, f"docs/api.md lacks ::: megabatch.{name}"
        assert "<p>" in rest.partition("doc-heading")[0], f"{name} has no docstring"


@pytest.mark.full
def test_links_out_of_the_docs_lead_to_a_copy_on_the_site(site: Path) -> None:
    (link,) = re.findall(r'href="([^"]*result\.json[^"]*)"', (site / "exactness" / "index.html").read_text())
    assert (site / "exactness" / link).resolve().read_bytes() == RESULT.read_bytes()


@pytest.mark.full
def test_a_mark_of_the_tests_is_not_on_the_site(site: Path) -> None:
    html = (site / "parallelism" / "index.html").read_text()
    assert "notest" not in html
    assert html.count('<div class="highlight"') == len(blocks(PAGES["docs/parallelism.md"], ".*"))


@pytest.mark.full
def test_pictures_in_html_are_on_the_site(site: Path) -> None:
    shown = re.findall(
        r'(?:src|srcset)="([^"]*assets/[a-z_]+-(?:light|dark)[^"]*)"', (site / "benchmarks" / "index.html").read_text()
    )
    assert len(shown) >= 2
    assert all((site / "benchmarks" / each).resolve().is_file() for each in shown)


def test_every_page_but_the_decisions_is_in_the_navigation() -> None:
    def leaves(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        else:
            for each in entry.values() if isinstance(entry, dict) else entry:
                yield from leaves(each)

    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert sorted(leaves(navigation)) == sorted(path.name for path in DOCS.glob("*.md"))


@pytest.mark.parametrize("name", READ)
def test_every_link_leads_somewhere(name: str) -> None:
    prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", READ[name], flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        path, _, anchor = target.partition("#")
        if target.startswith(("https://", "http://")):
            continue
        page = ((ROOT / name).parent / path).resolve() if path else ROOT / name
        assert page.exists(), f"{target} of {name}"
        assert not anchor or anchor in headings(page), f"{target} of {name}"


@cache
def headings(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = {slugify(title, "-") for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}
    return titles | set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))  # what mkdocstrings makes of a name
