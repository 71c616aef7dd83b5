"""Files of a checkpoint of transformers: `.safetensors`, single or in shards."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from heinsen_jax.errors import UserError
from heinsen_jax.interop.transformers.tensors import Names
from heinsen_jax.training.weights import INDEX_FILE, WEIGHTS_FILE, has_weights, weight_files

DTYPES = "F32", "F16", "BF16"
BUFFERS = re.compile(r"\.(rotary_emb\.inv_freq|(attn|attention)\.(masked_)?bias)$")
"""Constants that earlier versions saved with the weights."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file, without its values."""

    path: Path
    name: str
    shape: tuple[int, ...]


class Checkpoint:
    """The tensors of a folder; their values are read one by one.

    Args:
      folder: the folder.
      names: names of modules of its family. All but the readout share a prefix, which files of a
        model without its readout lack.

    Raises:
      UserError: a file is missing or damaged, or has a tensor of another dtype.
    """

    def __init__(self, folder: Path, names: Names) -> None:
        self.folder = folder
        if not has_weights(folder):
            others = sorted(path.name for path in folder.glob("*.bin"))
            found = f"only {others[0]}, in another format" if others else "no weights"
            raise UserError(
                f"{folder} has {found}; give a folder with {WEIGHTS_FILE} or {INDEX_FILE}"
            )
        place = weight_files(folder)
        files = [WEIGHTS_FILE] if place is None else sorted(set(place.values()))
        self._files = {folder / name: _open(folder / name) for name in files}
        found = {x.name: x for path in self._files for x in self._tensors(path)}
        for name, file in ({} if place is None else place).items():
            if name not in found or found[name].path.name != file:
                raise UserError(
                    f"{folder / file} has no tensor {name}, which {INDEX_FILE} says it has; fetch "
                    "both again"
                )
        self.embedding, self.readout = (f"{names[x][0]}.weight" for x in ("embed", "unembed"))
        prefix = self.embedding.partition(".")[0] + "."
        is_bare = not any(name.startswith(prefix) for name in found)
        self.tensors = {
            (prefix + name if is_bare and name != self.readout else name): tensor
            for name, tensor in found.items()
            if not BUFFERS.search(name)
        }

    def _tensors(self, path: Path) -> list[Tensor]:
        found = []
        for name in self._files[path].keys():  # noqa: SIM118 - no mapping
            part = self._files[path].get_slice(name)
            dtype = part.get_dtype()
            if dtype not in DTYPES and not BUFFERS.search(name):
                raise UserError(
                    f"{path}: tensor {name} has dtype {dtype}, which is unsupported; choose a "
                    f"checkpoint in one of {', '.join(DTYPES)}"
                )
            found.append(Tensor(path, name, tuple(part.get_shape())))
        return found

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Compare names and shapes with those that the model needs.

        Raises:
          UserError: they differ; the message names a tensor.
        """
        for name in sorted(expected.keys() ^ self.tensors.keys()):
            if name in expected:
                fix = "fetch the files again"
                if name == self.readout:
                    fix += ", or set tie_word_embeddings to true in config.json"
                raise UserError(f"{self.folder}: tensor {name} is missing; {fix}")
            raise UserError(
                f"{self.tensors[name].path}: tensor {name} is no part of the model that "
                "config.json describes; correct that file, or choose another model"
            )
        for name, shape in expected.items():
            if (tensor := self.tensors[name]).shape != shape:
                raise UserError(
                    f"{tensor.path}: tensor {name} has shape {[*tensor.shape]}, but config.json "
                    f"describes {[*shape]}; correct that file, or choose another model"
                )

    def read(self, name: str) -> np.ndarray:
        """The values of a tensor, in float32."""
        return self._values(self.tensors[name])

    def _values(self, tensor: Tensor) -> np.ndarray:
        try:
            value = self._files[tensor.path].get_tensor(tensor.name)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{tensor.path} cannot be read ({error}); fetch it again") from None
        return np.asarray(value).astype(np.float32)

    def check_tied(self) -> None:
        """Leave out the readout of a model with tied embeddings, if the files have it, too.

        Raises:
          UserError: it is no copy of the embedding.
        """
        ours, other = self.tensors.get(self.embedding), self.tensors.pop(self.readout, None)
        if ours is None or other is None:
            return
        if not np.array_equal(self._values(ours), self._values(other)):
            raise UserError(
                f"{other.path}: tensor {other.name} differs from {ours.name}, but config.json says "
                "that both are tied; set tie_word_embeddings to false there"
            )


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error}); fetch it again") from None
    except SafetensorError as error:
        raise UserError(f"{path} is damaged ({error}); fetch it again") from None
