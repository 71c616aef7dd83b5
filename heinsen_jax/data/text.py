"""Prepared text as a data set: windows of consecutive tokens, read from memory maps."""

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, overload

import grain
import numpy as np
import pydantic

from heinsen_jax.buckets import bucket_path, is_remote
from heinsen_jax.data.corpora import CORPORA
from heinsen_jax.data.dataset import Batch
from heinsen_jax.data.documents import Source, SplitName
from heinsen_jax.data.fetch import fetch_prepared
from heinsen_jax.data.files import sha256_of
from heinsen_jax.data.manifest import MANIFEST_FILE, Manifest, numpy_dtype
from heinsen_jax.data.prepare import SplitChoice, prepare, sources_of
from heinsen_jax.data.tokenizers import fingerprint, load_tokenizer, tokenizer_name
from heinsen_jax.data.units import joint_hash
from heinsen_jax.errors import UserError
from heinsen_jax.typing import config_dataclass


@config_dataclass
class DataConfig:
    """Text corpus, tokenizer, and shape of the batches."""

    corpus: str = "python-stdlib"
    """Name of a corpus, a text file, a folder, a .jsonl[.zst] file, or a prepared folder, on a disk
    or in a bucket, gs://bucket/folder."""
    tokenizer: str = "bytes"
    """bytes, the name of a tiktoken encoding (gpt2, ...), or a .tiktoken file."""
    cache: str = "data"
    """Folder for downloads and prepared data sets."""
    validation_fraction: Annotated[float, pydantic.Field(gt=0, lt=1)] | None = None
    """Fraction for validation; by default 0.1 of a single text file, else 0.01 of the documents."""
    sequence_length: pydantic.PositiveInt = 1024
    """Sequence length in tokens."""
    batch_size: pydantic.PositiveInt = 32
    """Global batch size, in sequences."""
    test_lengths: tuple[pydantic.PositiveInt, ...] = ()
    """Further sequence lengths at which to evaluate."""
    verify: bool = False
    """Before training, compare the hashes of all prepared tokens with the manifest."""

    @property
    def longest(self) -> int:
        """Maximum sequence length."""
        return max((self.sequence_length, *self.test_lengths))


class TokenSource:
    """The tokens of one split, shard by shard, read from memory maps."""

    def __init__(self, folder: Path, manifest: Manifest, split: SplitName) -> None:
        self._paths = [folder / shard.file for shard in manifest.splits[split].shards]
        dtype = numpy_dtype(manifest.dtype)
        self._shards = [np.asarray(np.memmap(path, dtype, mode="r")) for path in self._paths]
        self._vocab_size = manifest.vocab_size
        self.lengths = tuple(len(shard) for shard in self._shards)
        """Number of tokens of each shard."""

    def read(self, shard: int, start: int, length: int) -> np.ndarray:
        """int32 [length]: consecutive tokens of a shard; fewer at its end.

        Raises:
          UserError: a token is not in the vocabulary, so the file is damaged.
        """
        tokens = self._shards[shard][start : start + length]
        if tokens.size and tokens.max() >= self._vocab_size:
            raise UserError(
                f"{self._paths[shard]} is damaged: token {tokens.max()} near position {start} is "
                f"not in the vocabulary of {self._vocab_size}; delete the folder, prepare it again"
            )
        return tokens.astype(np.int32)


class TokenDataset:
    """A prepared data set: its tokenizer, its manifest and its tokens."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.name = str(folder)
        self.manifest = Manifest.load(folder)
        self.tokenizer = load_tokenizer(folder)
        if fingerprint(self.tokenizer) != self.manifest.tokenizer_fingerprint:
            raise UserError(
                f"{folder}: its tokenizer differs from that of its tokens; delete the folder and "
                "prepare it again"
            )

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.n_vocab

    @property
    def train_tokens(self) -> int:
        return self.manifest.splits["train"].tokens

    @property
    def bytes_per_token(self) -> float:
        split = self.manifest.splits["validation"]
        return split.bytes / split.tokens

    def train_row(self, config: DataConfig, seed: int) -> Callable[[int], Batch]:
        """An epoch visits windows at a stride of `sequence_length`, in random order, each shifted
        by a random offset within its shard. Shards shorter than a window are skipped."""
        source, length = self.split("train"), config.sequence_length
        everything = np.ones(length, bool)

        def read(window: tuple[int, int], rng: np.random.Generator) -> Batch:
            shard, start = window
            last = source.lengths[shard] - (length + 1)
            start = min(start + int(rng.integers(length)), last)
            return Batch(source.read(shard, start, length + 1), everything)

        starts = grain.MapDataset.source(_train_windows(source, length))
        rows = starts.seed(seed).shuffle().repeat().random_map(read)

        def row(number: int) -> Batch:
            batch = rows[number]
            assert batch is not None  # None only where data sets are filtered
            return batch

        return row

    def validation_rows(self, config: DataConfig) -> dict[str, Sequence[Batch]]:
        """Windows that cover the split once, in order: every token but the first of a shard is
        predicted once; the same for each of the `test_lengths`."""
        lengths = {"": config.sequence_length, **{str(n): n for n in config.test_lengths}}
        source = self.split("validation")
        return {name: _ValidationRows(source, length) for name, length in lengths.items()}

    def split(self, name: SplitName) -> TokenSource:
        """The tokens of a split."""
        return TokenSource(self.folder, self.manifest, name)


def load_text(config: DataConfig, *, split: SplitChoice = "auto") -> TokenDataset:
    """Load a text data set, and prepare it first if needed.

    Args:
      config: configuration of the data set.
      split: as for `prepare`; ignored for prepared folders and published splits.
    """
    if is_remote(config.corpus) and not config.corpus.startswith("hf://"):  # hubs are sources
        corpus = fetch_prepared(bucket_path(config.corpus, "data.corpus"), Path(config.cache))
    else:
        corpus = Path(config.corpus)
    if (corpus / MANIFEST_FILE).exists():
        dataset = TokenDataset(corpus)
        _check_prepared(dataset.manifest, config)
        return _verified(dataset, config)
    downloads = Path(config.cache) / "downloads"
    sources = sources_of(config.corpus, downloads)
    if all(source.has_published_split for source in sources):
        split = "auto"
    folder = Path(config.cache) / _folder_name(config, split, sources)
    if not (folder / MANIFEST_FILE).exists():
        prepare(
            [config.corpus],
            config.tokenizer,
            folder,
            validation_fraction=config.validation_fraction,
            split=split,
            downloads=downloads,
            wait=True,
        )
    return _verified(TokenDataset(folder), config)


def _verified(dataset: TokenDataset, config: DataConfig) -> TokenDataset:
    if config.verify:
        dataset.manifest.check_hashes(dataset.folder)
    return dataset


class _Windows:
    """(shard, first token) of every window: `counts[s]` windows in shard s at a given stride."""

    def __init__(self, counts: Sequence[int], stride: int) -> None:
        self._ends = np.cumsum(counts)
        self._stride = stride

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self._ends, index, side="right"))
        first = int(self._ends[shard - 1]) if shard else 0
        return shard, (index - first) * self._stride


class _ValidationRows(Sequence[Batch]):
    """Windows that cover a split; the last one of a shard is padded."""

    def __init__(self, source: TokenSource, length: int) -> None:
        self._source, self._length = source, length
        counts = [math.ceil((tokens - 1) / length) for tokens in source.lengths]
        self._windows = _Windows(counts, length)
        if not len(self._windows):
            raise UserError("validation text: too short to predict a token; give more text")

    def __len__(self) -> int:
        return len(self._windows)

    @overload
    def __getitem__(self, index: int) -> Batch: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Batch]: ...

    def __getitem__(self, index: int | slice) -> Batch | Sequence[Batch]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        shard, start = self._windows[index]
        found = self._source.read(shard, start, self._length + 1)
        missing = self._length + 1 - len(found)
        valid = np.arange(self._length) < len(found) - 1
        return Batch(np.pad(found, (0, missing)), valid)


def _train_windows(source: TokenSource, length: int) -> _Windows:
    if not source.lengths:
        raise UserError("data.corpus: it has no text for training; prepare it with another split")
    windows = _Windows([(tokens - 1) // length for tokens in source.lengths], length)
    if not len(windows):
        raise UserError(
            f"sequence_length={length} needs {length + 1} tokens in a row, but the longest train "
            f"shard has {max(source.lengths)}: give more text or make sequence_length smaller"
        )
    return windows


def _check_prepared(manifest: Manifest, config: DataConfig) -> None:
    """Check that a prepared folder agrees with the configuration."""
    if tokenizer_name(config.tokenizer) != manifest.tokenizer:
        raise UserError(
            f"tokenizer={config.tokenizer}, but {config.corpus} was prepared with "
            f"{manifest.tokenizer}: set tokenizer={manifest.tokenizer}"
        )
    if config.validation_fraction not in (None, manifest.validation_fraction):
        raise UserError(
            f"validation_fraction={config.validation_fraction}, but {config.corpus} was prepared "
            f"with {manifest.validation_fraction}: leave it out or prepare another folder"
        )


def _folder_name(config: DataConfig, split: SplitChoice, sources: Sequence[Source]) -> str:
    """Folder name in the cache: different for everything that may give different tokens."""
    path, tokenizer = Path(config.corpus), Path(config.tokenizer)
    is_corpus = config.corpus in CORPORA
    stem = config.corpus if is_corpus else re.sub(r"[^A-Za-z0-9]+", "-", path.resolve().stem)
    versions = [source.version for source in sources if source.remote is None]
    decides = [
        "" if is_corpus else str(path.resolve()),
        config.validation_fraction or "",
        "" if split == "auto" else split,
        sha256_of(tokenizer) if tokenizer.is_file() else "",
        *map(str, versions),
    ]
    mark = f"-{joint_hash(*map(str, decides))[:8]}" if any(decides) else ""
    return f"{stem.strip('-').lower()}{mark}-{tokenizer_name(config.tokenizer)}"
