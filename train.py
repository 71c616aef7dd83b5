"""Trains a language model.

    python train.py --config configs/quickstart.py [--workdir runs/mine] [--section.field VALUE ...]

A run that was stopped, or killed, goes on where it was when the same command is given again.
Stopped by Ctrl-C the exit code is 130, by SIGTERM 143; after bad input it is 2.
"""

import argparse
from pathlib import Path

from heinsen_jax import data
from heinsen_jax.config import check_workdir, load_config, override, record
from heinsen_jax.errors import command_line
from heinsen_jax.training.loop import check_settings, train


@command_line
def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("--config", required=True, help="a Python file, or a run's config.json")
    parser.add_argument("--workdir", help="the run's folder; runs/<name of the config> by default")
    options, overrides = parser.parse_known_args()
    config = override(load_config(options.config), overrides)
    name = Path(options.config)
    workdir = Path(options.workdir or Path("runs") / name.stem)

    check_workdir(workdir, config)
    dataset = data.load(config.data)
    check_settings(dataset, config)
    record(workdir, config, dataset)
    result = train(workdir, dataset, config)
    return 0 if result.signal is None else 128 + result.signal


if __name__ == "__main__":
    raise SystemExit(main())
