"""Pretrained models of the library transformers, as folders for the commands of this package.

    python -m heinsen_jax.interop.transformers import Qwen/Qwen3-0.6B --workdir runs/qwen3
    python -m heinsen_jax.interop.transformers export --workdir runs/qwen3 --output models/qwen3

`heinsen_jax.generate`, `heinsen_jax.chat`, `heinsen_jax.evaluate` and `heinsen_jax.interop.hub`
accept the first folder as `--workdir`; transformers loads the second.
"""

from pathlib import Path
from typing import Annotated

import tyro

from heinsen_jax.errors import command_line, printable
from heinsen_jax.generate.options import LATEST_HELP, WORKDIR_HELP
from heinsen_jax.interop.transformers import StoredDtype, import_model, to_pretrained
from heinsen_jax.runs.load import load_run


@command_line
def main() -> None:
    def read(
        model: Annotated[
            tyro.conf.Positional[str],
            tyro.conf.arg(help="folder, or owner/name of a repository of the hub"),
        ],
        workdir: Annotated[str, tyro.conf.arg(help="a new or empty folder")],
        revision: Annotated[
            str | None, tyro.conf.arg(help="branch, tag or commit of the repository")
        ] = None,
        allow_nonfinite: Annotated[
            bool, tyro.conf.arg(help="accept weights that are NaN or infinite")
        ] = False,
    ) -> None:
        """Write a model of transformers to a folder for the commands of this package."""
        place = import_model(model, workdir, revision=revision, allow_nonfinite=allow_nonfinite)
        print(printable(f"imported into {place}"))

    def write(
        workdir: Annotated[str, tyro.conf.arg(help=WORKDIR_HELP)],
        output: Annotated[Path, tyro.conf.arg(help="a new or empty folder")],
        like: Annotated[
            Path | None,
            tyro.conf.arg(help="folder of the original checkpoint, to copy its other fields"),
        ] = None,
        dtype: Annotated[
            StoredDtype | None,
            tyro.conf.arg(help="dtype of the tensors; that of --like, or float32, when None"),
        ] = None,
        latest: Annotated[bool, tyro.conf.arg(help=LATEST_HELP)] = False,
    ) -> None:
        """Write a run's model for transformers."""
        model, tokenizer, _ = load_run(workdir, best=not latest, on_host=True)
        place = to_pretrained(model, output, tokenizer=tokenizer, like=like, dtype=dtype)
        print(printable(f"exported to {place}"))

    tyro.extras.subcommand_cli_from_dict(
        {"import": read, "export": write},
        prog="python -m heinsen_jax.interop.transformers",
        description=__doc__,
    )


if __name__ == "__main__":
    raise SystemExit(main())
