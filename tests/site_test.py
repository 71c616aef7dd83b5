"""The documentation site builds without warnings and dead links, with the public functions."""

import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from heinsen_jax.attention import mechanism, names
from heinsen_jax.config import ExperimentConfig
from heinsen_jax.runtime.arguments import options_of

ROOT = Path(__file__).resolve().parents[1]


class Page(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links, self.anchors = set(), set()
        self.feed(file.read_text())

    def handle_starttag(self, tag, attrs) -> None:
        for name, value in attrs:
            if value and name in ("href", "src"):
                self.links.add(value)
            if value and name in ("id", "name"):
                self.anchors.add(value)


def dead_links(site: Path) -> list[str]:
    """Links within the site to files and anchors that do not exist."""
    pages = {file: Page(file) for file in site.rglob("*.html")}
    dead = []
    for file, page in pages.items():
        for link in page.links:
            to = urlsplit(link)
            if to.scheme or to.netloc or to.path.startswith("/"):
                continue
            target = (file.parent / unquote(to.path)).resolve() if to.path else file
            target = target / "index.html" if target.is_dir() else target
            is_page = target in pages and to.fragment not in ("", "__skip")
            if not target.exists() or (
                is_page and unquote(to.fragment) not in pages[target].anchors
            ):
                dead.append(f"{file.relative_to(site)}: {link}")
    return dead


def test_dead_links_are_found(tmp_path):
    (tmp_path / "other.html").write_text('<p id="here">')
    links = ["other.html", "other.html#here", "other.html#there", "none.png", "https://a.b/c"]
    (tmp_path / "index.html").write_text("".join(f'<a href="{x}">' for x in links))
    assert sorted(dead_links(tmp_path)) == ["index.html: none.png", "index.html: other.html#there"]


def test_the_site_builds_without_warnings():
    command = [sys.executable, "-m", "docs.build"]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    site = ROOT / "build/site"
    ops = (site / "reference/ops/index.html").read_text()
    assert 'id="heinsen_jax.ops.log_attention.log_attention"' in ops
    mechanisms = (site / "reference/mechanisms/index.html").read_text()
    searched = json.dumps(json.loads((site / "search.json").read_text()))
    for name in names():
        assert f'<h2 id="{name}">' in mechanisms
        kind = mechanism(name)
        assert f'id="{kind.__module__}.{kind.__name__}"' in mechanisms
        assert kind.__name__ in searched
        assert all(option in searched for option in options_of(kind.Config))
    options = (site / "reference/options/index.html").read_text()
    assert all(f"<code>{x.flag}</code>" in options for x in options_of(ExperimentConfig).values())
    assert (site / "benchmarks/results/front_page.png").exists()
    assert not dead_links(site)
