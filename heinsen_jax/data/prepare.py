"""Prepare text as token files: `python -m heinsen_jax.data.prepare INPUT... --output DIR`.

The inputs are divided into *units* of about 64 MB by a plan that depends only on their names and
sizes. A pure function converts one unit into shards, and finally writes a record of them. An
interrupted preparation resumes with the units without a record, and gives the same bytes.

    train-00000.bin, validation-00000.bin   token ids of unit 0: little-endian uint16 or uint32;
                                            also test-00000.bin, with a test split
    unit-00000.json                         its record
    recipe.json                             inputs, tokenizer and split of the data set
    tokenizer.json                          the tokenizer, with one further file
    manifest.json                           written last
"""

import itertools
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal, get_args

import pydantic

from heinsen_jax.data.inputs import (
    check_apart,
    ensure_local,
    hashed_sources,
    is_path,
    sources_by_input,
)
from heinsen_jax.data.manifest import (
    MANIFEST_FILE,
    InputRecord,
    Manifest,
    Recipe,
    Split,
    token_dtype,
)
from heinsen_jax.data.sources import (
    DEFAULT_COLUMN,
    SPLITS,
    Source,
    SplitName,
    TextKind,
)
from heinsen_jax.data.tokenizer_protocol import Tokenizer, has_name
from heinsen_jax.errors import UserError, check_regular, command_line, printable, without_extra
from heinsen_jax.runtime import on_ray
from heinsen_jax.runtime.arguments import POSITIONAL, parse
from heinsen_jax.storage.buckets import local_path
from heinsen_jax.storage.files import byte_progress, joint_hash
from heinsen_jax.storage.owners import LOCK_FILE

try:
    from heinsen_jax.data.tokenizers import (
        get_tokenizer,
        load_tokenizer,
        save_tokenizer,
        saved_name,
    )
    from heinsen_jax.data.units import (
        SplitRule,
        Unit,
        document_start,
        plan_units,
        process_unit,
        read_record,
    )
    from heinsen_jax.storage.locks import locked
except ImportError as missing:
    raise without_extra(missing, __name__) from missing

DEFAULT_FRACTIONS = {"tail": 0.1, "tails": 0.1, "document": 0.01}
FEW_DOCUMENTS = 5
"""With fewer validation documents, on average, a random choice could be empty or unbalanced."""

SplitChoice = Literal["auto", "document", "tail", "validation"]
Executor = Literal["local", "ray"]

_RECIPE_FILE = "recipe.json"
_OWN_PARTIAL = re.compile(
    r"((train|validation|test)-\d{5}\.bin|unit-\d{5}\.json|(recipe|manifest)\.json|tokenizer[a-z_.]*)"
    r"\.[0-9a-f]{12}\.partial"
)
"""Names of the partial files of a preparation."""


def prepare(
    inputs: Sequence[str],
    tokenizer: str,
    output: str | Path,
    *,
    validation_fraction: float | None = None,
    test_fraction: float = 0.0,
    split: SplitChoice = "auto",
    text_column: str = DEFAULT_COLUMN,
    downloads: str | Path = "data/downloads",
    executor: Executor = "local",
    wait: bool = False,
) -> Manifest:
    """Prepare a data set in `output`, or resume an interrupted preparation.

    Args:
      inputs: names of corpora; text, JSON and Parquet files, also compressed, and folders
        of them; or data sets of the Hugging Face Hub, `hf://owner/name[/config][:split]`.
      tokenizer: as for `get_tokenizer`.
      output: folder of the data set: new, empty, or made by this function from equal inputs.
      validation_fraction: fraction for validation; by default 0.1 with `tail`, else 0.01.
      test_fraction: fraction for the test split, which training never reads.
      split: `tail` uses the end of each document for validation and test, `document` random
        documents, `validation` everything for validation; `auto` is `tail` for one text file or a
        folder of few, else `document`. Published splits are kept.
      text_column: the column of the documents, in inputs that have rows.
      downloads: folder of downloaded corpora.
      executor: `local`, in this process, or `ray`, on a Ray cluster whose nodes share the inputs
        and the output under the same names. The result is the same.
      wait: whether to wait for another process that prepares a data set in `output`, instead of
        refusing.

    Raises:
      UserError: an argument is invalid, an input cannot be read or changes meanwhile, or `output`
        cannot be written, is in use, or has another data set or other files.
    """
    output = local_path(output, "output")
    for name in inputs:
        check_apart(output, name, "output")
    by_input = sources_by_input(inputs, local_path(downloads, "downloads"), text_column)
    rule = _split_rule(
        split, validation_fraction, test_fraction, [*itertools.chain(*by_input.values())]
    )
    _check_output(output)
    loaded_tokenizer = _tokenizer(tokenizer, output)
    by_input = hashed_sources(by_input)
    sources = [*itertools.chain(*by_input.values())]
    recipe = _recipe(by_input, loaded_tokenizer, rule, text_column)
    try:
        output.mkdir(parents=True, exist_ok=True)
        if _is_finished(recipe, output):
            return Manifest.load(output)
        with locked(output, wait=wait):
            if _is_finished(recipe, output):  # the process that held the lock has finished it
                return Manifest.load(output)
            for path in output.iterdir():
                if _OWN_PARTIAL.fullmatch(path.name):  # left by a killed process
                    path.unlink()
            recipe.write(output / _RECIPE_FILE)  # first, since it marks the folder as a data set
            save_tokenizer(loaded_tokenizer, output)
            units = plan_units(recipe, rule, sources)
            left = [unit for unit in units if read_record(unit, output) is None]
            _process(left, output, executor)
            return _finish(recipe, loaded_tokenizer, units, output)
    except OSError as error:
        raise UserError(f"output {output} cannot be written: {error}") from error


def _split_rule(
    choice: SplitChoice, fraction: float | None, test_fraction: float, sources: Sequence[Source]
) -> SplitRule:
    if all(source.has_published_split for source in sources):
        if choice != "auto" or fraction is not None or test_fraction:
            raise UserError(
                "split, validation_fraction and test_fraction: the input has its own validation "
                "text; leave them out"
            )
        return SplitRule("published", None)
    if choice == "validation":
        if fraction is not None or test_fraction:
            raise UserError(
                "validation_fraction and test_fraction: unsupported with split=validation, which "
                "uses all text; leave them out"
            )
        return SplitRule("validation", None)
    kind = "document"
    are_texts = all(source.kind in get_args(TextKind) for source in sources)
    smallest = min(filter(None, (fraction or DEFAULT_FRACTIONS[kind], test_fraction)))
    wanted = len(sources) * smallest
    if choice == "tail" or (choice == "auto" and are_texts and wanted < FEW_DOCUMENTS):
        kind = "tail" if len(sources) == 1 and are_texts else "tails"
    if fraction is None:
        fraction = DEFAULT_FRACTIONS[kind]
    if not 0 < fraction < 1:
        raise UserError(f"validation_fraction={fraction} must lie between 0 and 1, such as 0.01")
    if not 0 <= test_fraction < 1 - fraction:
        raise UserError(
            f"test_fraction={test_fraction} must be at least 0, and less than 1 with "
            f"validation_fraction={fraction}; make it smaller, such as 0.01"
        )
    return SplitRule(kind, fraction, test_fraction)


def _tokenizer(name: str, output: Path) -> Tokenizer:
    """Load a tokenizer by name, without the network if `output` has it already."""
    is_published = name != "bytes" and has_name(name)
    if is_published and saved_name(output) == name:
        return load_tokenizer(output)
    return get_tokenizer(name)


def _check_output(output: Path) -> None:
    """Refuse a folder whose files no preparation has written, such as a run's folder."""
    if not output.is_dir() or (output / _RECIPE_FILE).exists():
        return
    for path in output.iterdir():
        if path.name != LOCK_FILE and not _OWN_PARTIAL.fullmatch(path.name):
            raise UserError(
                f"output {output} has {path.name}, and no {_RECIPE_FILE} of a preparation; give "
                "the name of a new folder"
            )


def _recipe(
    sources: dict[str, list[Source]], tokenizer: Tokenizer, rule: SplitRule, text_column: str
) -> Recipe:
    return Recipe(
        tokenizer=tokenizer.name,
        tokenizer_fingerprint=tokenizer.fingerprint,
        start_ids=document_start(tokenizer),
        split=rule.kind,
        validation_fraction=rule.validation_fraction,
        test_fraction=rule.test_fraction,
        text_column=text_column,
        inputs=tuple(
            InputRecord(
                name=printable(Path(name).resolve().name) if is_path(name) else name,
                files=len(group),
                bytes=sum(source.size for source in group),
                fingerprint=joint_hash(*(str(source.identity) for source in group)),
            )
            for name, group in sources.items()
        ),
    )


def _is_finished(recipe: Recipe, output: Path) -> bool:
    """Whether `output` has the complete data set already; another data set is an error."""
    path = output / _RECIPE_FILE
    check_regular(path)
    if not path.exists():
        return False
    try:
        recorded = Recipe.model_validate_json(path.read_bytes())
    except pydantic.ValidationError:
        raise UserError(
            f"{path} is damaged, or not of a preparation; choose another output"
        ) from None
    wanted = dict(recipe)
    differing = [
        f"{field} ({_brief(value)}, not {_brief(wanted[field])})"
        for field, value in recorded
        if value != wanted[field]
    ]
    is_finished = (output / MANIFEST_FILE).exists()
    if differing and (is_finished or any(output.glob("unit-*.json"))):
        raise UserError(
            f"{output} holds a data set that differs in {', '.join(differing)}; "
            "choose another output or delete that folder"
        )
    return is_finished


def _brief(value: object) -> str:
    if isinstance(value, tuple):
        return " + ".join(map(_brief, value)) or "none"
    if isinstance(value, InputRecord):
        return (
            f"{value.name}: {value.files} files, {value.bytes} bytes, hash {value.fingerprint[:8]}"
        )
    return str(value)[:12]


def _process(units: Sequence[Unit], output: Path, executor: Executor) -> None:
    ensure_local([source for unit in units for source in unit.sources])
    total = sum(unit.size for unit in units)
    with byte_progress(f"preparing {output.name}", total) as advance:
        if executor == "ray":
            _process_on_ray(units, output, advance)
        else:
            for unit in units:
                process_unit(unit, output, advance)


def _process_on_ray(units: Sequence[Unit], output: Path, advance: Callable[[int], None]) -> None:
    folder = output.resolve()  # paths must not depend on the folder that a process runs in
    calls = {unit: (unit.resolved(), folder) for unit in units}
    for unit, _ in on_ray.calls(process_unit, calls, num_cpus=1):
        if read_record(unit, output) is None:
            raise UserError(
                f"{output} is not shared by all nodes: {unit.record_file} was written on another "
                "machine; choose an output on a shared file system"
            )
        advance(unit.size)


def _finish(recipe: Recipe, tokenizer: Tokenizer, units: Sequence[Unit], output: Path) -> Manifest:
    records = [record for unit in units if (record := read_record(unit, output))]
    splits: dict[SplitName, Split] = {
        name: Split.of(tuple(r.shards[name] for r in records if name in r.shards))
        for name in SPLITS
        if name != "test" or recipe.test_fraction or any(name in r.shards for r in records)
    }
    _check_splits(splits, recipe, output)
    manifest = Manifest(
        **dict(recipe),
        dtype=token_dtype(tokenizer.vocab_size),
        vocab_size=tokenizer.vocab_size,
        splits=splits,
    )
    manifest.check_hashes(output)
    manifest.write(output / MANIFEST_FILE)
    return Manifest.load(output)


def _check_splits(splits: dict[SplitName, Split], recipe: Recipe, output: Path) -> None:
    """Refuse a data set with an empty split, and remove its units so that another may follow."""
    empty = [name for name, split in splits.items() if not split.tokens]
    if not empty or (recipe.split == "validation" and empty == ["train"]):
        return
    for path in output.glob("unit-*.json"):
        path.unlink()
    if {"train", "validation"} <= {*empty}:
        names = ", ".join(record.name for record in recipe.inputs)
        raise UserError(f"{names}: contains no text; give a corpus that does")
    names = " + ".join(record.name for record in recipe.inputs)
    field = "test_fraction" if empty[0] == "test" else "validation_fraction"
    change = f"make {field} larger"
    if empty[0] == "train":
        other = f" or test_fraction={recipe.test_fraction}" if recipe.test_fraction else ""
        change = f"make {field}{other} smaller"
    raise UserError(
        f"{names}: no text is left for {empty[0]} with {field}={getattr(recipe, field)}; "
        f"{change}, give more text, or use the end of each document: "
        "python -m heinsen_jax.data.prepare ... --split tail"
    )


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """Prepare a data set from corpora, text, JSON and Parquet files, folders of them, or the
    Hugging Face Hub."""

    inputs: Annotated[tuple[str, ...], POSITIONAL]
    """Names of corpora (python-stdlib, tinyshakespeare, ...), paths, or
    hf://owner/name, with /config or :split if needed."""
    output: Path
    """Folder of the data set; an interrupted preparation resumes where it stopped."""
    tokenizer: str = "bytes"
    """bytes, a name that tiktoken knows (gpt2, ...), a .tiktoken file, or a tokenizer.json or its
    folder."""
    validation_fraction: float | None = None
    """Fraction for validation. When None: 0.1 with tail, else 0.01."""
    test_fraction: float = 0.0
    """Fraction for the test split, which training never reads."""
    split: SplitChoice = "auto"
    """Text for validation and test. document: random documents; tail: the end of each document;
    validation: everything for validation; auto: tail for one text file or a folder of few, else
    document."""
    text_column: str = DEFAULT_COLUMN
    """Column of the texts in JSON and Parquet files."""
    downloads: Path = Path("data/downloads")
    """Folder of downloaded corpora."""
    executor: Executor = "local"
    """local: in this process; ray: on a Ray cluster whose nodes share inputs and output."""


@command_line
def main() -> None:
    arguments = parse(
        PrepareOptions, prog="python -m heinsen_jax.data.prepare", description=__doc__
    )
    manifest = prepare(**vars(arguments))
    for name, split in manifest.splits.items():
        print(
            f"{name}: {split.tokens} tokens, {split.bytes} bytes, {split.documents} documents "
            f"in {printable(arguments.output)}"
        )


if __name__ == "__main__":
    sys.exit(main())
