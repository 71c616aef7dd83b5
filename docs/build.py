"""Build the documentation as a site.

    python -m docs.build        # writes build/site
    python -m docs.build serve  # shows it on this machine; give it again after changes

The README is the home page, pages may link to files of the repository, and their numbers come from
the records: pages are written to build/pages, from which Zensical builds the site.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from docs.figures import render

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "build/pages"
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


def main() -> int:
    shutil.rmtree(PAGES, ignore_errors=True)
    for source, name in files():
        target = PAGES / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".md":
            target.write_text(page(source, name))
        else:
            shutil.copyfile(source, target)
    command = sys.argv[1] if len(sys.argv) > 1 else "build"
    return subprocess.run([sys.executable, "-m", "zensical", command], cwd=ROOT).returncode


def files() -> Iterator[tuple[Path, str]]:
    """Pages and the files they link to, with their names in the site."""
    for path in (ROOT / "docs").rglob("*"):
        if path.suffix in (".md", ".css"):
            yield path, path.relative_to(ROOT / "docs").as_posix()
    for name, target in FROM_ROOT.items():
        yield ROOT / name, target
    for path in (path for pattern in LINKED for path in ROOT.glob(pattern)):
        if path.is_file():
            yield path, path.relative_to(ROOT).as_posix()


def page(source: Path, name: str) -> str:
    """A page with its numbers. Links lead to the same files as in the repository, and images to
    themselves in full size; a link to a folder becomes its text."""

    def resolve(link: re.Match[str]) -> str:
        mark, text, target, anchor = link.groups()
        path = (source.parent / target).resolve()
        if path.is_dir():
            return text
        linked = path.relative_to(ROOT).as_posix()
        linked = FROM_ROOT.get(linked, linked.removeprefix("docs/"))
        to = "../" * name.count("/") + linked
        return f"[![{text}]({to})]({to})" if mark else f"[{text}]({to}{anchor or ''})"

    text = source.read_text()
    return LINK.sub(resolve, render(text) if (ROOT / "docs") in source.parents else text)


if __name__ == "__main__":
    sys.exit(main())
