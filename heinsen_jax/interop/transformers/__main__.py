"""Pretrained models of the library transformers, as folders for the commands of this package.

    python -m heinsen_jax.interop.transformers import Qwen/Qwen3-0.6B --workdir runs/qwen3
    python -m heinsen_jax.interop.transformers export --workdir runs/qwen3 --output models/qwen3

`heinsen_jax.generate`, `heinsen_jax.chat`, `heinsen_jax.evaluate` and `heinsen_jax.interop.hub`
accept the first folder as `--workdir`; transformers loads the second.
"""

from pathlib import Path
from typing import Annotated

from heinsen_jax.errors import command_line, printable
from heinsen_jax.interop import transformers
from heinsen_jax.interop.transformers.checkpoint import StoredDtype
from heinsen_jax.models.config import Dtype
from heinsen_jax.runs.load import ModelOptions, load_run
from heinsen_jax.runtime.arguments import Form, only, parse_command
from heinsen_jax.typing import config_dataclass


@config_dataclass
class ImportOptions:
    """Write a model of transformers to a folder for the commands of this package."""

    model: Annotated[str, Form(only, is_positional=True)]
    """Folder, or owner/name of a repository of the hub."""
    workdir: str
    """A new or empty folder."""
    revision: str | None = None
    """Branch, tag or commit of the repository."""
    allow_nonfinite: bool = False
    """Accept weights that are NaN or infinite."""
    param_dtype: Dtype | None = None
    """Dtype of parameters except for vectors; when None, bfloat16 if the files have all of them in
    it, else float32."""


@config_dataclass
class ExportOptions(ModelOptions):
    """Write a run's model for transformers."""

    output: Path
    """A new or empty folder."""
    like: Path | None = None
    """Folder of the original checkpoint, to copy its other fields."""
    dtype: StoredDtype | None = None
    """Dtype of the tensors; when None, the dtype of --like, or float32 without it."""


@command_line
def main() -> None:
    commands = {"import": ImportOptions, "export": ExportOptions}
    prog = "python -m heinsen_jax.interop.transformers"
    match parse_command(commands, prog=prog, description=__doc__):
        case ImportOptions() as options:
            folder = transformers.import_model(
                options.model,
                options.workdir,
                revision=options.revision,
                allow_nonfinite=options.allow_nonfinite,
                param_dtype=options.param_dtype,
            )
            print(printable(f"imported into {folder}"))
        case ExportOptions() as options:
            model, tokenizer, _ = load_run(options.workdir, best=not options.latest, on_host=True)
            folder = transformers.to_pretrained(
                model, options.output, tokenizer=tokenizer, like=options.like, dtype=options.dtype
            )
            print(printable(f"exported to {folder}"))


if __name__ == "__main__":
    raise SystemExit(main())
