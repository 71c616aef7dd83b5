"""Train a language model: `python -m heinsen_jax.train`, from a clone.

python train.py --config configs/quickstart.py [--workdir runs/mine] [--section.field VALUE ...]
"""

from heinsen_jax.train import main

if __name__ == "__main__":
    raise SystemExit(main())
