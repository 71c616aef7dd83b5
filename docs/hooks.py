"""Hooks for MkDocs: the README is the home page, pages may link to files outside docs/, and their
numbers come from the records."""

import re
from pathlib import Path

from figures import render
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
FROM_ROOT = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
}
"""Pages of the repository's root, by their names in the site."""
LINKED = (
    "benchmarks/results/**/*",
    "configs/**/*.py",
    "notebooks/*.ipynb",
    "scripts/*",
    "Dockerfile",
    "LICENSE",
    "CITATION.cff",
)
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^):#\s]+)(#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the root and all files that pages link to."""
    paths = [path for pattern in LINKED for path in ROOT.glob(pattern) if path.is_file()]
    for path in paths:
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    for name, uri in FROM_ROOT.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in numbers, and resolve links as on the repository's own pages; a link to a folder
    becomes its text."""
    uri = page.file.src_uri
    is_of_root = uri in FROM_ROOT.values()
    is_of_docs = not is_of_root and not uri.startswith("benchmarks/")
    folder = ((ROOT / "docs" if is_of_docs else ROOT) / uri).parent

    def resolve(link: re.Match[str]) -> str:
        mark, text, target, anchor = link.groups()
        path = (folder / target).resolve()
        if path.is_dir():
            return text
        name = path.relative_to(ROOT).as_posix()
        name = FROM_ROOT.get(name, name.removeprefix("docs/"))
        up = "../" * uri.count("/")
        return f"{mark}[{text}]({up}{name}{anchor or ''})"

    return LINK.sub(resolve, render(markdown) if is_of_docs else markdown)
