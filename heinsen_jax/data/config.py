"""Configuration of text data: corpus, tokenizer, and shape of the batches."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import pydantic

from heinsen_jax.data.corpora import CORPORA
from heinsen_jax.data.manifest import MANIFEST_FILE
from heinsen_jax.data.sources import DEFAULT_COLUMN
from heinsen_jax.data.tasks import AnyTask, Task
from heinsen_jax.data.tokenizer_protocol import has_name
from heinsen_jax.errors import UserError
from heinsen_jax.runtime.arguments import Form
from heinsen_jax.storage.buckets import absolute_path
from heinsen_jax.typing import JSON, config_dataclass

Documents: TypeAlias = Literal["separate", "continuous"]
MODEL = "model://"
"""Start of `corpus` in the configuration of an imported model, whose training text is unknown; the
name of the model follows."""


@config_dataclass
class DataConfig:
    """Text corpus, tokenizer, and shape of the batches."""

    corpus: str = "python-stdlib"
    """Name of a corpus; a text, JSON or Parquet file, or a folder of them; a data set of the
    Hugging Face Hub, hf://owner/name, with /config or :split if needed; or a prepared folder, on a
    disk or in a bucket, gs://bucket/folder."""
    mixture: Annotated[
        dict[str, pydantic.NonNegativeFloat] | None, Form(lambda values: _parse_mixture(values))
    ] = None
    """Several corpora in place of `corpus`, each with a weight: rows of training in proportion to
    the weights. Validation metrics are the corpora's means by these weights, or by the last of
    `mixture_stages`; each corpus's metrics have its name."""
    mixture_stages: Annotated[
        tuple[tuple[pydantic.PositiveInt, dict[str, pydantic.NonNegativeFloat]], ...],
        Form(None),
    ] = ()
    """Pairs (step, mixture): from that step on, counted from 0, other weights, also 0, and other
    corpora. Only in configuration files."""
    text_column: str = DEFAULT_COLUMN
    """Column of the texts in JSON and Parquet files."""
    tokenizer: str = "bytes"
    """bytes, a name that tiktoken knows (gpt2, ...), a .tiktoken file, or a tokenizer.json or its
    folder."""
    cache: str = "data"
    """Folder for downloads and prepared data sets."""
    validation_fraction: Annotated[float, pydantic.Field(gt=0, lt=1)] | None = None
    """Fraction for validation. When None: 0.1 of a text file, or of each file of a folder with few,
    else 0.01 of the documents."""
    test_fraction: Annotated[float, pydantic.Field(ge=0, lt=1)] = 0.0
    """Fraction for the test split, which training never reads: `heinsen_jax.evaluate --split
    test`."""
    sequence_length: pydantic.PositiveInt = 1024
    """Sequence length, in tokens."""
    batch_size: pydantic.PositiveInt = 32
    """Global batch size, in sequences."""
    documents: Documents | None = None
    """separate: tokens attend only to their own document, and no document's first token is
    predicted from another one. continuous: tokens attend to all previous tokens of the sequence.
    When None, separate if end-of-text tokens divide the corpus and all mechanisms of the model
    support segments, else continuous; training reports the choice."""
    packing: Literal["windows", "best_fit"] = "windows"
    """Sequences of training. windows: consecutive tokens of the corpus. best_fit: whole separate
    documents, longer ones in segments, and padding where none fits. Validation has windows."""
    test_lengths: tuple[pydantic.PositiveInt, ...] = ()
    """Further sequence lengths, in tokens, at which to evaluate."""
    verify: bool = False
    """Before training, compare the hashes of all prepared tokens with the manifest."""

    def __post_init__(self) -> None:
        if self.packing == "best_fit" and self.documents == "continuous":
            raise ValueError(
                "packing='best_fit' with documents='continuous': packed documents are separate; "
                "set packing='windows' or documents='separate'"
            )
        self._check_mixture()

    def _check_mixture(self) -> None:
        steps = [step for step, _ in self.mixture_stages]
        if self.mixture is None and steps:
            raise ValueError("mixture_stages without mixture; give the weights of the first steps")
        if steps != sorted({*steps}):
            raise ValueError(
                f"mixture_stages: steps {steps} do not increase; sort them, without repeats"
            )
        for weights in self.mixtures:
            if not sum(weights.values()) > 0:
                raise ValueError(f"mixture {weights}: no weight is above 0; give at least one")

    @property
    def mixtures(self) -> list[dict[str, float]]:
        """The weights of all stages, in order; none without a mixture."""
        first = [] if self.mixture is None else [self.mixture]
        return [*first, *(weights for _, weights in self.mixture_stages)]

    @property
    def longest(self) -> int:
        """Maximum sequence length."""
        return max((self.sequence_length, *self.test_lengths))

    def absolute(self) -> "DataConfig":
        """A copy with absolute paths, for processes in other folders."""

        def with_absolute_paths(mixture: dict[str, float]) -> dict[str, float]:
            return {_absolute_corpus(name): weight for name, weight in mixture.items()}

        return replace(
            self,
            corpus=_absolute_corpus(self.corpus),
            mixture=None if self.mixture is None else with_absolute_paths(self.mixture),
            mixture_stages=tuple((step, with_absolute_paths(x)) for step, x in self.mixture_stages),
            tokenizer=self.tokenizer if has_name(self.tokenizer) else absolute_path(self.tokenizer),
            cache=absolute_path(self.cache),
        )


def _kind(config: DataConfig | Task | dict[str, JSON]) -> str:
    """Tag of a configuration, or of a dictionary of its fields."""
    get = config.get if isinstance(config, dict) else lambda name: getattr(config, name, None)
    return str(get("task") or "text")


AnyDataConfig = Annotated[
    Annotated[DataConfig, pydantic.Tag("text")] | AnyTask, pydantic.Discriminator(_kind)
]
"""Configuration of a text data set or of a task."""


def _parse_mixture(values: Sequence[str]) -> dict[str, str] | None:
    """Read pairs of a corpus and its weight from the command line."""
    if [*values] == ["None"]:
        return None
    try:
        pairs = dict(zip(values[::2], values[1::2], strict=True))
        [float(x) for x in pairs.values()]
    except ValueError:
        pairs = {}
    if not pairs:
        given = " ".join(values)
        raise UserError(
            f"{given}: must be pairs of a corpus and its weight, as in --data.mixture A 0.7 B 0.3"
        )
    return pairs


def _absolute_corpus(name: str) -> str:
    is_named = name in CORPORA and not (Path(name) / MANIFEST_FILE).exists()
    return name if is_named else absolute_path(name)
