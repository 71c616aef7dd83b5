"""Write the models of `tests/golden/transformers` by `to_pretrained`, without the originals.

    python tests/golden/write_exports.py FOLDER
    make/bin/python tests/golden/make_transformers.py check FOLDER

The second command, in an environment of transformers, reads and records them.
"""

import sys
from pathlib import Path

from heinsen_jax.interop.transformers import from_pretrained, to_pretrained

for config in (Path(__file__).resolve().parent / "transformers").glob("*/config.json"):
    model, tokenizer = from_pretrained(config.parent)
    to_pretrained(model, Path(sys.argv[1]) / config.parent.name, tokenizer=tokenizer)
