"""Pretrained models of the library transformers, as folders for the commands of this package.

    python -m heinsen_jax.interop.transformers import Qwen/Qwen3-0.6B --workdir runs/qwen3
    python -m heinsen_jax.interop.transformers export --workdir runs/qwen3 --output models/qwen3

`heinsen_jax.generate`, `heinsen_jax.chat`, `heinsen_jax.evaluate` and `heinsen_jax.interop.hub`
accept the first folder as `--workdir`; transformers loads the second.
"""

import json
from pathlib import Path
from typing import Annotated

import tyro
from flax import nnx

from heinsen_jax.buckets import local_path
from heinsen_jax.config import ExperimentConfig, OptimizerConfig, as_json
from heinsen_jax.data import DataConfig, save_tokenizer
from heinsen_jax.data.config import MODEL
from heinsen_jax.data.files import check_new_folder, filling
from heinsen_jax.data.tokenizer_json import TOKENIZER_FILE
from heinsen_jax.errors import UserError, command_line
from heinsen_jax.generate.options import LATEST_HELP, WORKDIR_HELP
from heinsen_jax.interop.transformers import StoredDtype, from_pretrained, to_pretrained
from heinsen_jax.pytrees import flatten_with_names
from heinsen_jax.training.checkpoint import CONFIG_FILE, load_run
from heinsen_jax.training.weights import save_weights


def import_model(name: str, workdir: str | Path, *, revision: str | None = None) -> Path:
    """Write the configuration, the weights and the tokenizer of a model of transformers to a new
    folder, which the commands of this package accept as `--workdir`.

    The optimizer of its configuration is one for further training: AdamW with learning rates up to
    5e-5.

    Raises:
      UserError: as `from_pretrained`; or the model has no `tokenizer.json`, or the folder is not
        empty.
    """
    place = local_path(workdir, "--workdir")
    check_new_folder(place)
    model, tokenizer = from_pretrained(name, revision=revision, on_host=True)
    if tokenizer is None:
        raise UserError(
            f"{name} has no tokenizer.json; add the file, for example with save_pretrained of its "
            "tokenizer in transformers"
        )
    length = min(DataConfig().sequence_length, model.config.max_length or 10**9)
    corpus = MODEL + (Path(name).resolve().name if Path(name).is_dir() else name)
    data = DataConfig(corpus=corpus, tokenizer=TOKENIZER_FILE, sequence_length=length)
    optimizer = OptimizerConfig(learning_rate=5e-5, end_learning_rate=5e-6)
    config = as_json(ExperimentConfig(model=model.config, data=data, optimizer=optimizer))
    with filling(place) as partial:
        arrays = flatten_with_names(nnx.state(model, nnx.Param))
        save_weights(partial, arrays, step=0)
        (partial / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_tokenizer(tokenizer, partial)
    return place


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
    ) -> None:
        """Write a model of transformers to a folder for the commands of this package."""
        print(f"imported into {import_model(model, workdir, revision=revision)}")

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
        print(f"exported to {place}")

    tyro.extras.subcommand_cli_from_dict(
        {"import": read, "export": write},
        prog="python -m heinsen_jax.interop.transformers",
        description=__doc__,
    )


if __name__ == "__main__":
    raise SystemExit(main())
