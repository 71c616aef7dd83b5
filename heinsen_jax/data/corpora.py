"""Corpora by name: sources and expected contents."""

import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from heinsen_jax.data.download import Remote
from heinsen_jax.data.sources import Kind, Source


@dataclass(frozen=True)
class Corpus:
    """Public collection of documents."""

    description: str
    kind: Kind
    file_name: str = ""
    """File name of the download."""
    remote: Remote | None = None
    """Source of the download; `None` if every machine already has it."""


# Sizes and hashes of WikiText and OpenWebText are recorded in `dataset_infos.json` of Hugging
# Face `datasets`. The original site of WikiText is gone; its author's site has the file.
CORPORA: dict[str, Corpus] = {
    "python-stdlib": Corpus(
        "the source of the Python standard library on this machine: 12 MB, no download",
        kind="python",
    ),
    "tinyshakespeare": Corpus(
        "speeches from Shakespeare's plays in one file: 1.1 MB, the last tenth for validation",
        kind="text",
        file_name="tinyshakespeare.txt",
        remote=Remote(
            "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
            size=1_115_394,
            sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
        ),
    ),
    "wikitext-2": Corpus(
        "720 good Wikipedia articles, raw, with their published split: 13 MB",
        kind="wikitext",
        file_name="wikitext-2-raw-v1.zip",
        remote=Remote(
            "https://wikitext.smerity.com/wikitext-2-raw-v1.zip",
            size=4_721_645,
            sha256="ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11",
        ),
    ),
    "wikitext-103": Corpus(
        "28 thousand good Wikipedia articles, raw, with their published split: 550 MB",
        kind="wikitext",
        file_name="wikitext-103-raw-v1.zip",
        remote=Remote(
            "https://wikitext.smerity.com/wikitext-103-raw-v1.zip",
            size=191_984_949,
            sha256="91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794",
        ),
    ),
    "openwebtext": Corpus(
        "8 million pages that Reddit users recommended: 13 GB to download, 40 GB of text",
        kind="openwebtext",
        file_name="openwebtext.tar.xz",
        remote=Remote(
            "https://zenodo.org/record/3834942/files/openwebtext.tar.xz",
            size=12_880_027_468,
            sha256="9fe39d154c5bc67da8c359415372b79510eb1e2edb0d035fe4f7fc3a732b9336",
        ),
    ),
}

_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def corpus_sources(name: str, downloads: Path) -> list[Source]:
    """Return the sources of the corpus `name`, without downloading them.

    Args:
      name: a key of `CORPORA`.
      downloads: folder of downloaded files.
    """
    corpus = CORPORA[name]
    if corpus.remote is None:
        return _library_sources(name, corpus.kind, Path(sysconfig.get_path("stdlib")))
    path = downloads / corpus.file_name
    return [Source(name, path, corpus.kind, corpus.remote.size, corpus.remote)]


def _library_sources(name: str, kind: Kind, folder: Path) -> list[Source]:
    """Return all modules of the standard library in sorted order, without its tests."""
    prefix = f"{name}-{sys.version_info.major}.{sys.version_info.minor}"
    relatives = (path.relative_to(folder) for path in folder.rglob("*.py"))
    modules = (relative for relative in relatives if _NOT_LIBRARY.isdisjoint(relative.parts))
    return [
        Source(f"{prefix}/{relative.as_posix()}", folder / relative, kind, size)
        for relative in sorted(modules, key=lambda relative: relative.parts)
        if (size := (folder / relative).stat().st_size)
    ]
