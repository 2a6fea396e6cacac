"""Hooks of mkdocs: every decision is in the navigation, and links out of docs/ lead to a copy."""

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

MARK = re.compile(r"^(```\w+) notest-\w+$", re.MULTILINE)  # of the tests: why a block is not run with the others
LINK = re.compile(r"\]\(((?:\.\./)+)([\w./-]+)\)")
ASSET = re.compile(r'(src|srcset)="assets/')  # in HTML, which mkdocs leaves alone; a page is a folder on the site
SOURCES = "sources"  # where the site has files of the repository that a page links to


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    decisions = sorted(Path(config.docs_dir, "decisions").glob("*.md"))
    folded = {"Decisions": [f"decisions/{path.name}" for path in decisions]}  # closed, as a group inside of a section
    config.nav = [*(config.nav or []), {"Background": [folded]}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    docs = Path(config.docs_dir)
    linked = {path for page in docs.rglob("*.md") for path in outside(page, page.read_text(encoding="utf-8"), docs)}
    for path in sorted(linked):
        name = path.relative_to(docs.parent)
        files.append(File.generated(config, f"{SOURCES}/{name}.txt", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    docs = Path(config.docs_dir)
    source = docs / page.file.src_uri
    depth = "../" * (len(Path(page.file.src_uri).parts) - 1)

    def inside(match: re.Match[str]) -> str:
        path = (source.parent / (match[1] + match[2])).resolve()
        known = path.is_file() and not path.is_relative_to(docs)
        return f"]({depth}{SOURCES}/{path.relative_to(docs.parent)}.txt)" if known else match[0]

    pictured = ASSET.sub(rf'\1="{depth}../assets/', markdown) if source.stem != "index" else markdown
    return LINK.sub(inside, MARK.sub(r"\1", pictured))


def outside(page: Path, markdown: str, docs: Path) -> set[Path]:
    """Files of the repository, outside of docs/, to which a page links."""
    paths = {(page.parent / (up + rest)).resolve() for up, rest in LINK.findall(markdown)}
    return {path for path in paths if path.is_file() and not path.is_relative_to(docs)}
