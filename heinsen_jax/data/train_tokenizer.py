"""Train a tokenizer on text.

python -m heinsen_jax.data.train_tokenizer INPUT... --vocab-size N --output DIR

The tokenizer is byte-level BPE like GPT-2's: every text can be encoded. Equal inputs give equal
tokenizers. The output is a folder with a `tokenizer.json`, or such a file, for `--data.tokenizer`.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import pydantic

from heinsen_jax.data.inputs import ensure_local, sources_by_input
from heinsen_jax.data.sources import DEFAULT_COLUMN, Source
from heinsen_jax.data.tokenizer_protocol import SETTINGS_FILE, TOKENIZER_FILE, Tokenizer
from heinsen_jax.errors import UserError, command_line, printable, without_extra
from heinsen_jax.runtime.arguments import POSITIONAL, parse
from heinsen_jax.storage.buckets import local_path
from heinsen_jax.storage.files import byte_progress, storage_errors, write_atomically

try:
    from tokenizers import Tokenizer as RustTokenizer
    from tokenizers import decoders, models, pre_tokenizers, trainers

    from heinsen_jax.data.documents import read_documents
    from heinsen_jax.data.tokenizer_json import JsonTokenizer, as_json
    from heinsen_jax.data.tokenizers import END_OF_TEXT, tokenizer_name
except ImportError as missing:
    raise without_extra(missing, __name__) from missing

SMALLEST = 257  # the bytes and the end of text


def train_tokenizer(
    inputs: Sequence[str],
    vocab_size: int,
    output: str | Path,
    *,
    text_column: str = DEFAULT_COLUMN,
    downloads: str | Path = "data/downloads",
) -> Tokenizer:
    """Train a tokenizer on the documents of inputs, without published validation and test splits.

    Args:
      inputs: as for `prepare`.
      vocab_size: number of tokens, the bytes and `<|endoftext|>` among them. The vocabulary is
        smaller if a short text has no more pairs of tokens.
      output: a folder, or a file that ends in `.json`; it must not have a tokenizer.
      text_column: the column of the documents, in inputs that have rows.
      downloads: folder of downloaded corpora.

    Raises:
      UserError: an argument is invalid, an input cannot be read, or `output` cannot be written or
        exists.
    """
    output = local_path(output, "output")
    is_file = output.suffix == ".json"
    file = output if is_file else output / TOKENIZER_FILE
    if vocab_size < SMALLEST:
        raise UserError(f"vocab_size={vocab_size} must be at least {SMALLEST}")
    for path in (file,) if is_file else (file, output / SETTINGS_FILE):
        if path.exists():
            raise UserError(f"output {path} exists; choose another or delete it")
    by_input = sources_by_input(inputs, local_path(downloads, "downloads"), text_column)
    sources = [source for group in by_input.values() for source in group]
    with storage_errors(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
    ensure_local(sources)
    document = _train(sources, vocab_size)
    config = {"eos_token": END_OF_TEXT}
    tokenizer = JsonTokenizer(tokenizer_name(str(output)), file, document, config)
    with storage_errors(file.parent):
        if is_file:
            write_atomically(file, as_json(document))
        else:
            tokenizer.save(output)
    return tokenizer


def _train(sources: Sequence[Source], vocab_size: int) -> dict:
    """Return the content of `tokenizer.json`."""
    tokenizer = RustTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(sources), trainer)
    return json.loads(tokenizer.to_str())


def _texts(sources: Sequence[Source]) -> Iterator[str]:
    with byte_progress("counting words", sum(source.size for source in sources)) as advance:
        for source in sources:
            for document in read_documents(source, advance):
                if document.split in (None, "train"):
                    yield document.text
    print("merging the most frequent pairs", file=sys.stderr)


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True)
class TrainTokenizerOptions:
    """Train a tokenizer of byte-level BPE."""

    inputs: Annotated[tuple[str, ...], POSITIONAL]
    """Names of corpora (python-stdlib, tinyshakespeare, ...), paths, or
    hf://owner/name, with /config or :split if needed."""
    output: Path
    """Folder for tokenizer.json, or a file that ends in .json."""
    vocab_size: int
    """Number of tokens, the 256 bytes and <|endoftext|> among them."""
    text_column: str = DEFAULT_COLUMN
    """Column of the texts in JSON and Parquet files."""
    downloads: Path = Path("data/downloads")
    """Folder of downloaded corpora."""


@command_line
def main() -> None:
    options = parse(
        TrainTokenizerOptions,
        prog="python -m heinsen_jax.data.train_tokenizer",
        description=__doc__,
    )
    tokenizer = train_tokenizer(**vars(options))
    output = printable(options.output)
    print(f"{tokenizer.vocab_size} tokens in {output}: --data.tokenizer {output}")
    if tokenizer.vocab_size < options.vocab_size:
        print(f"fewer than {options.vocab_size}, since the text has no more pairs of tokens")


if __name__ == "__main__":
    sys.exit(main())
