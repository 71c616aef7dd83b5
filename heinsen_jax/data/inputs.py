"""Inputs by name: the sources of corpora, files, folders, and data sets of the Hub."""

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from heinsen_jax.data.corpora import CORPORA, corpus_sources
from heinsen_jax.data.download import ensure_downloaded
from heinsen_jax.data.sources import DEFAULT_COLUMN, Source, check_sources, find_sources
from heinsen_jax.errors import UserError, extra_module
from heinsen_jax.storage.files import byte_progress

HUB = "hf://"
"""Prefix of the names of data sets of the Hugging Face Hub."""

LARGE = 1 << 30
"""Size of the inputs, in bytes, above which hashing has a progress bar."""


def sources_by_input(
    inputs: Sequence[str], downloads: Path, text_column: str
) -> dict[str, list[Source]]:
    """The sources of each input.

    Raises:
      UserError: an input is missing, empty or given twice, or needs an extra that is not installed.
    """
    if not inputs:
        raise UserError(
            f"inputs: none given; give a corpus ({', '.join(CORPORA)}), a file or a folder"
        )
    sources: dict[str, list[Source]] = {}
    for name in inputs:
        if name in sources:
            raise UserError(f"input {name} is given twice; give it once")
        sources[name] = sources_of(name, downloads, text_column)
        if not sources[name]:
            raise UserError(f"input {name} contains no text; give one that does")
    check_sources([source for group in sources.values() for source in group])
    return sources


def sources_of(name: str, downloads: Path, text_column: str = DEFAULT_COLUMN) -> list[Source]:
    """The sources of a corpus, a file, a folder or a data set of the Hub.

    Raises:
      UserError: it does not exist.
    """
    if name in CORPORA:
        return corpus_sources(name, downloads)
    if name.startswith(HUB):
        return extra_module("heinsen_jax.data.hub").hub_sources(name, text_column)
    if not Path(name).exists():
        raise UserError(
            f"input {name} does not exist; give one of {', '.join(CORPORA)}, a file or a folder"
        )
    return find_sources(Path(name), text_column)


def is_path(name: str) -> bool:
    """Whether an input is a file or a folder, not the name of a data set."""
    return name not in CORPORA and not name.startswith(HUB)


def check_apart(folder: Path, corpus: str, field: str) -> None:
    """Refuse a folder for results inside a folder of texts: they would be read as texts later.

    Raises:
      UserError: it is inside, and not hidden.
    """
    place, texts = folder.resolve(), Path(corpus).resolve()
    is_inside = is_path(corpus) and place.is_relative_to(texts)
    if is_inside and not any(x.startswith(".") for x in place.relative_to(texts).parts):
        raise UserError(
            f"{field} {folder} is inside {corpus}, so that it would be read as text at the next "
            "start; give a folder elsewhere, or move the texts into a folder of their own"
        )


def hashed_sources(sources: dict[str, list[Source]]) -> dict[str, list[Source]]:
    """Hash the sources, with a progress bar for large ones."""
    total = sum(x.size for x in itertools.chain(*sources.values()) if x.is_local)
    progress = byte_progress("hashing the inputs", total)
    with progress if total >= LARGE else nullcontext(lambda count: None) as advance:

        def hashed(source: Source) -> Source:
            source = source.hashed()
            advance(source.size if source.is_local else 0)
            return source

        return {name: [hashed(source) for source in group] for name, group in sources.items()}


def ensure_local(sources: Sequence[Source]) -> None:
    """Download the files of corpora."""
    for source in sources:
        if source.remote is not None:
            ensure_downloaded(source.remote, source.path)
