"""From text and synthetic tasks to batches: tokenizers, corpora, preparation, input pipeline.

Names are imported at first use: the pipeline needs grain and JAX, for which
`python -m heinsen_jax.data.prepare` should not wait.
"""

from typing import TYPE_CHECKING

from heinsen_jax.runtime.lazy import attributes

if TYPE_CHECKING:
    from heinsen_jax.data.config import AnyDataConfig, DataConfig
    from heinsen_jax.data.corpora import CORPORA
    from heinsen_jax.data.dataset import Batch, Dataset
    from heinsen_jax.data.manifest import Manifest
    from heinsen_jax.data.mixture import MixedDataset, TextDataset
    from heinsen_jax.data.pipeline import load, train_batches, validation_batches
    from heinsen_jax.data.tasks import (
        Copying,
        Induction,
        Needle,
        Recall,
        SelectiveCopying,
        StateTracking,
        Task,
        TaskDataset,
    )
    from heinsen_jax.data.text import TokenDataset, TokenSource
    from heinsen_jax.data.tokenizer_protocol import Tokenizer, start_ids, stop_ids
    from heinsen_jax.data.tokenizers import (
        END_OF_TEXT,
        PretrainedTokenizer,
        get_tokenizer,
        load_tokenizer,
        save_tokenizer,
    )

__all__ = [
    "CORPORA",
    "END_OF_TEXT",
    "AnyDataConfig",
    "Batch",
    "Copying",
    "DataConfig",
    "Dataset",
    "Induction",
    "Manifest",
    "MixedDataset",
    "Needle",
    "PretrainedTokenizer",
    "Recall",
    "SelectiveCopying",
    "StateTracking",
    "Task",
    "TaskDataset",
    "TextDataset",
    "TokenDataset",
    "TokenSource",
    "Tokenizer",
    "get_tokenizer",
    "load",
    "load_tokenizer",
    "save_tokenizer",
    "start_ids",
    "stop_ids",
    "train_batches",
    "validation_batches",
]

__getattr__ = attributes(
    __name__,
    __all__,
    (
        "tokenizer_protocol",
        "tokenizers",
        "corpora",
        "manifest",
        "dataset",
        "config",
        "text",
        "mixture",
        "tasks",
        "pipeline",
    ),
)
