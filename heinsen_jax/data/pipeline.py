"""From token files to batches: every training batch is a pure function of (seed, step)."""

import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import grain
import numpy as np
import pydantic

from heinsen_jax.data.corpora import CORPORA
from heinsen_jax.data.documents import SplitName
from heinsen_jax.data.manifest import MANIFEST_FILE, Manifest, numpy_dtype
from heinsen_jax.data.prepare import prepare
from heinsen_jax.data.tokenizers import fingerprint, load_tokenizer, tokenizer_name
from heinsen_jax.errors import UserError
from heinsen_jax.typing import config_dataclass

ENDLESS = 1 << 60  # sequences


@config_dataclass
class DataConfig:
    """Which text is learned, and in what portions."""

    corpus: str = "python-stdlib"
    """A corpus by name, a text file, folder or .jsonl[.zst], or a folder prepared earlier."""
    tokenizer: str = "bytes"
    """bytes, a name that tiktoken knows (gpt2, ...), or a .tiktoken file."""
    cache: str = "data"
    """The folder that receives downloads and prepared data sets."""
    validation_fraction: Annotated[float, pydantic.Field(gt=0, lt=1)] | None = None
    """How much of the text is for validation; by default 0.1 of a single text, else 0.01."""
    sequence_length: pydantic.PositiveInt = 1024
    """Tokens that a model sees at once."""
    batch_size: pydantic.PositiveInt = 32
    """Sequences in a batch, over all processes."""


class ValidationBatch(NamedTuple):
    """Some windows of the validation text, in order."""

    tokens: np.ndarray
    """int32 [B, T+1]: predict `tokens[:, 1:]` from `tokens[:, :-1]`."""
    mask: np.ndarray
    """bool [B, T]: which of these predictions count; the others are padding."""


class TokenSource:
    """The tokens of one split, shard by shard, read from memory maps."""

    def __init__(self, folder: Path, manifest: Manifest, split: SplitName) -> None:
        self._paths = [folder / shard.file for shard in manifest.splits[split].shards]
        dtype = numpy_dtype(manifest.dtype)
        self._shards = [np.asarray(np.memmap(path, dtype, mode="r")) for path in self._paths]
        self._vocab_size = manifest.vocab_size
        self.lengths = tuple(len(shard) for shard in self._shards)
        """The number of tokens in each shard."""

    def read(self, shard: int, start: int, length: int) -> np.ndarray:
        """int32 [length]: consecutive tokens of a shard. Fewer at its end.

        Raises:
            UserError: A token is not in the vocabulary, so the file is damaged.
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
        self.manifest = Manifest.load(folder)
        self.tokenizer = load_tokenizer(folder)
        if fingerprint(self.tokenizer) != self.manifest.tokenizer_fingerprint:
            raise UserError(
                f"{folder} holds another tokenizer than its tokens are from: "
                "delete the folder, prepare it again"
            )

    def split(self, name: SplitName) -> TokenSource:
        """The tokens for training or for validation."""
        return TokenSource(self.folder, self.manifest, name)


def load(config: DataConfig) -> TokenDataset:
    """The data set that `config` names; it is prepared first where that is still to be done."""
    if (Path(config.corpus) / MANIFEST_FILE).exists():
        dataset = TokenDataset(config.corpus)
        _check_prepared(dataset.manifest, config)
        return dataset
    folder = Path(config.cache) / f"{_slug(config.corpus)}-{tokenizer_name(config.tokenizer)}"
    prepare(
        [config.corpus],
        config.tokenizer,
        folder,
        validation_fraction=config.validation_fraction,
        downloads=Path(config.cache) / "downloads",
    )
    return TokenDataset(folder)


def train_batches(
    dataset: TokenDataset,
    config: DataConfig,
    *,
    seed: int,
    start_step: int = 0,
    process_index: int = 0,
    process_count: int = 1,
) -> Iterator[np.ndarray]:
    """Training batches without end: int32 [batch_size / process_count, sequence_length + 1].

    An epoch visits windows that begin `sequence_length` apart, in an order of its own, each moved
    by a random offset of its own within its shard. A shard too short for one window is not visited.

    Args:
        dataset: Where the tokens are.
        config: The sequence length and the batch size over all processes.
        seed: With the step it decides the batch; where iteration starts does not matter.
        start_step: The step of the first batch.
        process_index: Which of equal parts of every batch to read, in order. Put together, a step
            has the same sequences in the same rows however many parts there are.
        process_count: How many parts there are.
    """
    local_batch = _local_batch(config, process_count)
    source, length = dataset.split("train"), config.sequence_length
    starts = _train_windows(source, length)

    def read(window: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
        shard, start = window
        last = source.lengths[shard] - (length + 1)
        return source.read(shard, min(start + int(rng.integers(length)), last), length + 1)

    sequences = grain.MapDataset.source(starts).seed(seed).shuffle().repeat().random_map(read)

    def sequence(index: int) -> np.ndarray | None:
        step, row = divmod(index, local_batch)
        return sequences[step * config.batch_size + process_index * local_batch + row]

    batches = grain.MapDataset.range(ENDLESS).map(sequence).batch(local_batch)
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
    return iter(batches[start_step:].to_iter_dataset(options))


def validation_batches(
    dataset: TokenDataset,
    config: DataConfig,
    *,
    max_batches: int | None = None,
    process_index: int = 0,
    process_count: int = 1,
) -> Iterator[ValidationBatch]:
    """The validation text once, in order: every token but the first of a shard is predicted once.

    All batches have the full shape and every process yields equally many; what is missing at the
    end is padding that the mask leaves out. `max_batches` stops early.
    """
    local_batch = _local_batch(config, process_count)
    source, length = dataset.split("validation"), config.sequence_length
    windows = _Windows([math.ceil((tokens - 1) / length) for tokens in source.lengths], length)
    if not len(windows):
        raise UserError("validation text: there is nothing to predict in it; give more text")
    count = math.ceil(len(windows) / config.batch_size)
    for step in range(count if max_batches is None else min(count, max_batches)):
        first = step * config.batch_size + process_index * local_batch
        rows = range(first, first + local_batch)
        yield _validation_batch(
            source, [windows[i] for i in rows if i < len(windows)], local_batch, length
        )


class _Windows:
    """(shard, first token) of every window: `counts[s]` of them in shard s, `stride` apart."""

    def __init__(self, counts: Sequence[int], stride: int) -> None:
        self._ends = np.cumsum(counts)
        self._stride = stride

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self._ends, index, side="right"))
        first = int(self._ends[shard - 1]) if shard else 0
        return shard, (index - first) * self._stride


def _train_windows(source: TokenSource, length: int) -> _Windows:
    windows = _Windows([(tokens - 1) // length for tokens in source.lengths], length)
    if not len(windows):
        raise UserError(
            f"sequence_length={length} needs {length + 1} tokens in a row, but the longest train "
            f"shard has {max(source.lengths)}: give more text or make sequence_length smaller"
        )
    return windows


def _validation_batch(
    source: TokenSource, windows: Sequence[tuple[int, int]], size: int, length: int
) -> ValidationBatch:
    batch = ValidationBatch(np.zeros((size, length + 1), np.int32), np.zeros((size, length), bool))
    for row, (shard, start) in enumerate(windows):
        tokens = source.read(shard, start, length + 1)
        batch.tokens[row, : len(tokens)] = tokens
        batch.mask[row, : len(tokens) - 1] = True
    return batch


def _local_batch(config: DataConfig, process_count: int) -> int:
    if config.batch_size % process_count:
        raise UserError(
            f"batch_size={config.batch_size} cannot be shared by {process_count} processes: "
            f"make it a multiple of {process_count}"
        )
    return config.batch_size // process_count


def _check_prepared(manifest: Manifest, config: DataConfig) -> None:
    """A folder that was prepared earlier must agree with what the configuration says of it."""
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


def _slug(corpus: str) -> str:
    """A folder name for a corpus; that of a path tells apart equal names in different places."""
    if corpus in CORPORA:
        return corpus
    path = Path(corpus).resolve()
    place = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9]+', '-', path.stem).strip('-').lower()}-{place}"
