"""Several prepared corpora as one data set, mixed by weights that may change with the step."""

import bisect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias, get_args

import grain

from heinsen_jax.data.config import DataConfig, Documents
from heinsen_jax.data.dataset import Batch, MixedRows
from heinsen_jax.data.inputs import HUB, sources_of
from heinsen_jax.data.manifest import MANIFEST_FILE
from heinsen_jax.data.sources import DEFAULT_COLUMN, HeldOut, RowKind
from heinsen_jax.data.text import TokenDataset, load_text
from heinsen_jax.errors import UserError
from heinsen_jax.storage.buckets import is_remote, local_path

ENDLESS = 1 << 40  # rows


class MixedDataset:
    """Sources of training rows by name, each a corpus of its own.

    A stage's weights apply from its step on. Rows alternate between the sources in proportion to
    their weights, rounded to hundredths of the smallest, and each source continues in its own
    random order, also across stages; so a row is a pure function of the seed and its number.

    Args:
      sources: the data sets by name, with one tokenizer.
      config: the configuration, with a mixture.

    Raises:
      UserError: the tokenizers of sources differ.
    """

    has_labels: bool = False

    def __init__(self, sources: Mapping[str, TokenDataset], config: DataConfig) -> None:
        self.sources = sources
        self.name = " + ".join(sources)
        first, *others = sources.values()
        self.tokenizer = first.tokenizer
        for other in others:
            if other.manifest.tokenizer_fingerprint != first.manifest.tokenizer_fingerprint:
                raise UserError(
                    f"data.mixture: {other.name} and {first.name} have different tokenizers; "
                    "prepare them with the same one"
                )
        begins = [0, *(step for step, _ in config.mixture_stages)]
        weights = ({Path(x).name: w for x, w in each.items()} for each in config.mixtures)
        self._stages = [*zip(begins, weights, strict=True)]

    @property
    def validation_weights(self) -> dict[str, float]:
        """The weight of each source in metrics of held-out text; their sum is 1. They are the
        weights of the last stage at all steps, so that the losses of all checkpoints are
        comparable."""
        weights = self._stages[-1][1]
        total = sum(weights.values())
        return {name: weights.get(name, 0.0) / total for name in self.sources}

    @property
    def vocab_size(self) -> int:
        return next(iter(self.sources.values())).vocab_size

    @property
    def train_tokens(self) -> None:
        """None, since the sources have epochs of different lengths."""
        return

    def bytes_per_token(self, config: DataConfig, split: HeldOut = "validation") -> float:
        """The mean of the sources' bytes per token, by `validation_weights`."""
        config = replace(config, documents=self.documents(config))
        return sum(
            weight * self.sources[name].bytes_per_token(config, split)
            for name, weight in self.validation_weights.items()
            if weight
        )

    @property
    def has_test(self) -> bool:
        """Whether all sources have a test split."""
        return all(source.has_test for source in self.sources.values())

    @property
    def content(self) -> bytes:
        """Manifests of the sources, as JSON."""
        manifests = {name: json.loads(source.content) for name, source in self.sources.items()}
        return (json.dumps(manifests, indent=2) + "\n").encode()

    def documents(self, config: DataConfig) -> Documents:
        """Separate if the documents of a source are, else continuous."""
        chosen = {source.documents(config) for source in self.sources.values()}
        return "separate" if "separate" in chosen else "continuous"

    def padding(self, config: DataConfig) -> float:
        """Fraction of the tokens of training rows that is padding, with the first weights."""
        weights = self._stages[0][1]
        total = sum(weights.values())
        return sum(self.sources[n].padding(config) * w / total for n, w in weights.items())

    def epochs(self, config: DataConfig, steps: int) -> dict[str, float]:
        """Number of epochs of each source in the first updates."""
        epochs = dict.fromkeys(self.sources, 0.0)
        begins = [min(begin, steps) for begin, _ in self._stages]
        for (_, weights), begin, end in zip(
            self._stages, begins, [*begins[1:], steps], strict=True
        ):
            tokens = (end - begin) * config.batch_size * config.sequence_length
            for name, weight in weights.items():
                source = self.sources[name]
                part = weight / sum(weights.values()) * (1 - source.padding(config))
                epochs[name] += part * tokens / source.train_tokens
        return epochs

    def train_row(self, config: DataConfig, seed: int) -> Callable[[int], Batch]:
        """Rows of the sources in proportion to the weights of the stage of their step."""
        config = replace(config, documents=self.documents(config))
        rows = {
            name: grain.MapDataset.range(ENDLESS).map(source.train_row(config, seed + number))
            for number, (name, source) in enumerate(self.sources.items())
        }
        begins = [step * config.batch_size for step, _ in self._stages]
        used, mixtures = dict.fromkeys(rows, 0), []
        for (_, weights), begin, end in zip(self._stages, begins, [*begins[1:], 0], strict=True):
            shares = _shares(weights)
            mixtures.append(_mix(rows, used, shares))
            for name, share in shares.items():  # an upper bound, so that no row repeats
                used[name] += -(-(end - begin) * share // sum(shares.values()))

        def row(number: int) -> Batch:
            stage = bisect.bisect_right(begins, number) - 1
            batch = mixtures[stage][number - begins[stage]]
            assert batch is not None
            return batch

        return row

    def held_out_rows(
        self, config: DataConfig, split: HeldOut = "validation"
    ) -> dict[str, Sequence[Batch]]:
        """`MixedRows` of all sources, at each length; and the rows of each source, by its name."""
        if split == "test" and not self.has_test:
            lacking = [name for name, source in self.sources.items() if not source.has_test]
            raise UserError(
                f"data.mixture: no test split of {', '.join(lacking)}; train with "
                "--data.test-fraction, or prepare with --test-fraction, such as 0.05"
            )
        config = replace(config, documents=self.documents(config))
        by_source = {name: x.held_out_rows(config, split) for name, x in self.sources.items()}
        weights = self.validation_weights
        mixed = {
            length: MixedRows({name: x[length] for name, x in by_source.items()}, weights)
            for length in next(iter(by_source.values()))
        }
        return {**mixed, **{name: rows[""] for name, rows in by_source.items()}}


TextDataset: TypeAlias = TokenDataset | MixedDataset


def load_mixture(config: DataConfig) -> MixedDataset:
    """Load the corpora of a mixture, and prepare them first if needed.

    Raises:
      UserError: a corpus cannot be loaded, or its name is also the name of another corpus or a test
        length.
    """
    chosen = dict.fromkeys(name for weights in config.mixtures for name in weights)
    by_name: dict[str, TokenDataset] = {}
    for corpus in chosen:
        name = Path(corpus).name
        if name in by_name or name in map(str, config.test_lengths):
            raise UserError(
                f"data.mixture: the name of {corpus} is in use; give corpora whose last path "
                "components differ, since metrics are named after them"
            )
        by_name[name] = load_text(of_corpus(config, corpus))
    return MixedDataset(by_name, config)


def of_corpus(config: DataConfig, corpus: str) -> DataConfig:
    """The configuration of one corpus of a mixture, without fields that only others need: a column
    if its texts are not in rows, and fractions if its splits are published."""
    config = replace(config, corpus=corpus, mixture=None, mixture_stages=())
    in_bucket = is_remote(corpus) and not corpus.startswith(HUB)
    if in_bucket or (Path(corpus) / MANIFEST_FILE).exists():
        return replace(config, text_column=DEFAULT_COLUMN)
    downloads = local_path(config.cache, "data.cache") / "downloads"
    sources = sources_of(corpus, downloads, config.text_column)
    if not any(source.kind in get_args(RowKind) for source in sources):
        config = replace(config, text_column=DEFAULT_COLUMN)
    if all(source.has_published_split for source in sources):
        config = replace(config, validation_fraction=None, test_fraction=0.0)
    return config


def _shares(weights: Mapping[str, float]) -> dict[str, int]:
    """The nonzero weights as integers, of which the smallest is 100: others would be truncated to
    such integers by grain."""
    smallest = min(weight for weight in weights.values() if weight)
    return {name: round(100 * weight / smallest) for name, weight in weights.items() if weight}


def _mix(
    rows: Mapping[str, grain.MapDataset[Batch]], used: Mapping[str, int], shares: Mapping[str, int]
) -> grain.MapDataset[Batch]:
    """Unused rows of the sources, in proportion to the shares."""
    unused = [rows[name].slice(slice(used[name], None)) for name in shares]
    return grain.MapDataset.mix(unused, [*shares.values()])
