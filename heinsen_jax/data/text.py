"""Prepared text as a data set: windows of consecutive tokens, read from memory maps."""

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import grain
import numpy as np

from heinsen_jax.data.config import MODEL, DataConfig, Documents
from heinsen_jax.data.corpora import CORPORA
from heinsen_jax.data.dataset import Batch, RowSequence
from heinsen_jax.data.fetch import fetch_prepared
from heinsen_jax.data.inputs import HUB, check_apart, is_path, sources_of
from heinsen_jax.data.manifest import MANIFEST_FILE, Manifest, numpy_dtype
from heinsen_jax.data.packing import Plan, Segment, packed_row
from heinsen_jax.data.prepare import SplitChoice, prepare
from heinsen_jax.data.sources import DEFAULT_COLUMN, HeldOut, Source, SplitName
from heinsen_jax.data.tokenizers import (
    get_tokenizer,
    has_name,
    load_tokenizer,
    tokenizer_name,
    tokenizer_version,
)
from heinsen_jax.data.units import document_start
from heinsen_jax.errors import UserError
from heinsen_jax.storage.buckets import bucket_path, is_remote, local_path
from heinsen_jax.storage.files import joint_hash

RowFn: TypeAlias = Callable[[np.ndarray, int], Batch]
"""Function from at most T + 1 tokens, and T, to a row."""
_BLOCK = 1 << 24  # tokens that are searched together


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

    def document_ends(self, shard: int, end_of_text: int) -> np.ndarray:
        """Positions after the last token of each document of a shard, in order."""
        tokens = self._shards[shard]
        ends = [
            np.flatnonzero(tokens[start : start + _BLOCK] == end_of_text) + start + 1
            for start in range(0, len(tokens), _BLOCK)
        ]
        return np.unique(np.concatenate([*ends, [len(tokens)]]))


class TokenDataset:
    """A prepared data set: its tokenizer, its manifest and its tokens."""

    has_labels: bool = False

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.name = str(folder)
        self.manifest = Manifest.load(folder)
        self.tokenizer = load_tokenizer(folder)
        if self.tokenizer.fingerprint != self.manifest.tokenizer_fingerprint:
            raise UserError(
                f"{folder}: its tokens were made with another tokenizer; delete the folder and "
                "prepare it again"
            )
        if document_start(self.tokenizer) != self.manifest.start_ids:
            raise UserError(
                f"{folder}: its documents do not begin with the tokens that its tokenizer starts "
                "texts with; delete the folder and prepare it again"
            )
        self._plans: dict[int, Plan] = {}
        self._splits: dict[SplitName, TokenSource] = {}

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def train_tokens(self) -> int:
        return self.manifest.splits["train"].tokens

    def bytes_per_token(self, config: DataConfig, split: HeldOut = "validation") -> float:
        chosen = self.manifest.splits[split]
        has_start = bool(self.manifest.start_ids) and self.documents(config) == "separate"
        return chosen.bytes / (chosen.tokens - has_start * chosen.documents)  # never predicted

    @property
    def has_test(self) -> bool:
        return "test" in self.manifest.splits

    @property
    def content(self) -> bytes:
        """The manifest, which has the hashes of the tokens."""
        return self.manifest.as_bytes()

    @property
    def has_documents(self) -> bool:
        """Whether end-of-text tokens divide a shard into several documents."""
        shards = [shard for split in self.manifest.splits.values() for shard in split.shards]
        return self.manifest.split != "tail" and any(shard.documents > 1 for shard in shards)

    def documents(self, config: DataConfig) -> Documents:
        """`config.documents`, or its default for a model that supports segments."""
        is_separate = config.packing == "best_fit" or self.has_documents
        return config.documents or ("separate" if is_separate else "continuous")

    def plan(self, length: int) -> Plan:
        """Rows of whole training documents, each of which predicts `length` tokens."""
        if length not in self._plans:
            source, end = self.split("train"), self.tokenizer.end_of_text_id
            _check_text(source)
            ends = [source.document_ends(shard, end) for shard in range(len(source.lengths))]
            self._plans[length] = plan = Plan(ends, length)
            if not len(plan):
                raise UserError("data.corpus: no document has a second token; give more text")
        return self._plans[length]

    def padding(self, config: DataConfig) -> float:
        """Fraction of the tokens of training sequences that is padding."""
        return self.plan(config.sequence_length).padding if config.packing == "best_fit" else 0.0

    def train_row(self, config: DataConfig, seed: int) -> Callable[[int], Batch]:
        """An epoch visits windows at a stride of `sequence_length`, in random order, each shifted
        by a random offset within its shard. Shards shorter than a window are skipped. Or, by
        `packing`, it visits the rows of `plan` in random order."""
        source, length, as_row = self.split("train"), config.sequence_length, self._as_row(config)

        def read_window(window: tuple[int, int], rng: np.random.Generator) -> Batch:
            shard, start = window
            last = source.lengths[shard] - (length + 1)
            start = min(start + int(rng.integers(length)), last)
            return as_row(source.read(shard, start, length + 1), length)

        def read_segments(row: tuple[int, list[Segment]]) -> Batch:
            shard, segments = row
            return packed_row([source.read(shard, *segment) for segment in segments], length)

        if config.packing == "best_fit":
            plan = grain.MapDataset.source(self.plan(length))
            rows = plan.seed(seed).shuffle().repeat().map(read_segments)
        else:
            starts = grain.MapDataset.source(_train_windows(source, length))
            rows = starts.seed(seed).shuffle().repeat().random_map(read_window)

        def row(number: int) -> Batch:
            batch = rows[number]
            assert batch is not None  # None only where data sets are filtered
            return batch

        return row

    def held_out_rows(
        self, config: DataConfig, split: HeldOut = "validation"
    ) -> dict[str, Sequence[Batch]]:
        """Windows that cover the split once, in order: every token but the first of a shard is
        predicted once; the same for each of the `test_lengths`."""
        if split not in self.manifest.splits:
            raise UserError(
                f"{self.name} has no test split; train with --data.test-fraction, or prepare "
                "with --test-fraction, such as 0.05, or give data whose test split is published"
            )
        lengths = {"": config.sequence_length, **{str(n): n for n in config.test_lengths}}
        source, as_row = self.split(split), self._as_row(config)
        rows: dict[str, Sequence[Batch]] = {
            name: _HeldOutRows(source, length, as_row) for name, length in lengths.items()
        }
        if not all(rows.values()):
            raise UserError(f"{split} text: too short to predict a token; give more text")
        return rows

    def _as_row(self, config: DataConfig) -> RowFn:
        if self.documents(config) == "continuous":
            return _continuous_row
        end = self.tokenizer.end_of_text_id
        return lambda tokens, length: packed_row(
            np.split(tokens, np.flatnonzero(tokens == end) + 1), length
        )

    def split(self, name: SplitName) -> TokenSource:
        """The tokens of a split, whose files stay open, since the cache may be deleted."""
        if name not in self._splits:
            self._splits[name] = TokenSource(self.folder, self.manifest, name)
        return self._splits[name]


def load_text(config: DataConfig, *, split: SplitChoice = "auto") -> TokenDataset:
    """Load a text data set, and prepare it first if needed.

    Args:
      config: configuration of the data set.
      split: as for `prepare`; ignored for prepared folders and published splits.

    Raises:
      UserError: the corpus is an imported model's, which is unknown, or cannot be prepared.
    """
    if config.corpus.startswith(MODEL):
        raise UserError(
            f"data.corpus={config.corpus}: the training text of an imported model is unknown; give "
            "a file, a folder or the name of a corpus: --data.corpus of heinsen_jax.train, --data "
            "of heinsen_jax.evaluate and heinsen_jax.linearize"
        )
    cache = local_path(config.cache, "data.cache")
    if is_remote(config.corpus) and not config.corpus.startswith(HUB):
        corpus = fetch_prepared(bucket_path(config.corpus, "data.corpus"), cache)
    else:
        corpus = Path(config.corpus)
    if (corpus / MANIFEST_FILE).exists():
        dataset = TokenDataset(corpus)
        _check_prepared(dataset.manifest, config)
        return _verified(dataset, config)
    check_apart(cache, config.corpus, "data.cache")
    downloads = cache / "downloads"
    sources = sources_of(config.corpus, downloads, config.text_column)
    if all(source.has_published_split for source in sources):
        split = "auto"
    folder = cache / _folder_name(config, split, sources)
    if not (folder / MANIFEST_FILE).exists():
        prepare(
            [config.corpus],
            config.tokenizer,
            folder,
            validation_fraction=config.validation_fraction,
            test_fraction=config.test_fraction,
            split=split,
            text_column=config.text_column,
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


class _HeldOutRows(RowSequence):
    """Windows that cover a split; the last one of a shard is padded."""

    def __init__(self, source: TokenSource, length: int, as_row: RowFn) -> None:
        self._source, self._length, self._as_row = source, length, as_row
        counts = [math.ceil((tokens - 1) / length) for tokens in source.lengths]
        self._windows = _Windows(counts, length)

    def __len__(self) -> int:
        return len(self._windows)

    def row(self, index: int) -> Batch:
        shard, start = self._windows[index]
        return self._as_row(self._source.read(shard, start, self._length + 1), self._length)


def _continuous_row(tokens: np.ndarray, length: int) -> Batch:
    """A row of these tokens and padding."""
    missing = length + 1 - len(tokens)
    valid = np.arange(length) < len(tokens) - 1
    return Batch(np.pad(tokens, (0, missing)) if missing else tokens, valid)


def _check_text(source: TokenSource) -> None:
    if not source.lengths:
        raise UserError("data.corpus: it has no text for training; prepare it with another split")


def _train_windows(source: TokenSource, length: int) -> _Windows:
    _check_text(source)
    windows = _Windows([(tokens - 1) // length for tokens in source.lengths], length)
    if not len(windows):
        raise UserError(
            f"sequence_length={length} needs {length + 1} tokens in a row, but the longest train "
            f"shard has {max(source.lengths)}; give more text or make sequence_length smaller"
        )
    return windows


def _check_prepared(manifest: Manifest, config: DataConfig) -> None:
    """Check that a prepared folder agrees with the configuration."""
    if tokenizer_name(config.tokenizer) != manifest.tokenizer:
        raise UserError(
            f"tokenizer={config.tokenizer}, but {config.corpus} was prepared with "
            f"{manifest.tokenizer}; set tokenizer={manifest.tokenizer}"
        )
    is_local = not has_name(config.tokenizer) and Path(config.tokenizer).exists()
    if is_local and get_tokenizer(config.tokenizer).fingerprint != manifest.tokenizer_fingerprint:
        raise UserError(
            f"tokenizer={config.tokenizer} differs from the {manifest.tokenizer} with which "
            f"{config.corpus} was prepared; set tokenizer={config.corpus}, or prepare it again"
        )
    defaults = {"validation_fraction": None, "test_fraction": 0.0, "text_column": DEFAULT_COLUMN}
    for name, default in defaults.items():
        given, prepared = getattr(config, name), getattr(manifest, name)
        if given not in (default, prepared):
            raise UserError(
                f"{name}={given}, but {config.corpus} was prepared with {prepared}; leave it out "
                "or prepare another folder"
            )


def _folder_name(config: DataConfig, split: SplitChoice, sources: Sequence[Source]) -> str:
    """Folder name in the cache, which differs wherever tokens may differ."""
    path = Path(config.corpus)
    is_local = is_path(config.corpus)
    name = path.resolve().stem if is_local else config.corpus.removeprefix(HUB)
    stem = config.corpus if config.corpus in CORPORA else re.sub(r"[^A-Za-z0-9]+", "-", name)
    versions = [source.version for source in sources if source.remote is None]
    decides = [
        str(path.resolve()) if is_local else "",
        config.validation_fraction or "",
        "" if split == "auto" else split,
        tokenizer_version(config.tokenizer),
        *map(str, versions),
    ]
    if config.text_column != DEFAULT_COLUMN:
        decides.append(config.text_column)
    if config.test_fraction:
        decides.append(f"test {config.test_fraction}")
    mark = f"-{joint_hash(*map(str, decides))[:8]}" if any(decides) else ""
    return f"{stem.strip('-').lower()}{mark}-{tokenizer_name(config.tokenizer)}"
