"""Files of a checkpoint of transformers: `.safetensors`, single or in shards."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from safetensors import safe_open

from heinsen_jax.errors import UserError
from heinsen_jax.interop.tensors import Names, places_of
from heinsen_jax.models import LanguageModelConfig
from heinsen_jax.runs.weights import (
    INDEX_FILE,
    WEIGHTS_FILE,
    check_finite,
    has_weights,
    reading_arrays,
    weight_files,
)

GGUF = ".gguf"
FETCH_AGAIN = "fetch it again"
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
StoredDtype: TypeAlias = Literal["float32", "bfloat16", "float16"]
BUFFERS = re.compile(r"\.(rotary_emb\.inv_freq|(attn|attention)\.(masked_)?bias)$")
"""Constants that earlier versions saved with the weights."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file, without its values."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


class Checkpoint:
    """The tensors of a folder; their values are read one by one.

    Args:
      folder: the folder.
      names: names of modules of its family. All but the readout share a prefix, which is missing in
        files of a model without its readout.
      text_prefix: beginning of names in place of "model.", if any.
      ignored: beginnings of names of tensors that are left out.
      allow_nonfinite: whether values may be NaN or infinite.
      of_file: an open file, in place of the files in the folder, with the interface of `safe_open`.

    Raises:
      UserError: a file is missing or damaged, or has a tensor of another dtype.
    """

    def __init__(
        self,
        folder: Path,
        names: Names,
        *,
        text_prefix: str = "",
        ignored: tuple[str, ...] = (),
        allow_nonfinite: bool = False,
        of_file: Any = None,
    ) -> None:
        self.folder, self._allow_nonfinite = folder, allow_nonfinite
        self._names = names
        self._files: dict[Path, Any] = {folder: of_file}
        self._divided: dict[str, tuple[list[Tensor], slice]] = {}
        index = None
        self._source, self._remedy = "its header", FETCH_AGAIN
        if of_file is None:
            self._source, self._remedy = "config.json", "correct that file"
            index, self._files = _opened(folder)
        merged = {
            "model." + name.removeprefix(text_prefix)
            if text_prefix and name.startswith(text_prefix)
            else name: tensor
            for name, tensor in self._merged({} if index is None else index).items()
            if not name.startswith(ignored)
        }
        self.embedding, self.readout = (f"{names[x][0]}.weight" for x in ("embed", "unembed"))
        prefix = self.embedding.partition(".")[0] + "."
        is_bare = not any(name.startswith(prefix) for name in merged)
        self.tensors = {
            (prefix + name if is_bare and name != self.readout else name): tensor
            for name, tensor in merged.items()
            if not BUFFERS.search(name)
        }

    def _merged(self, index: Mapping[str, str]) -> dict[str, Tensor]:
        """Merge the tensors of all files; the index, if any, has the file of each tensor.

        Raises:
          UserError: a file lacks a tensor of the index, or files have different values for one.
        """
        copies: dict[str, list[Tensor]] = {}
        for path in self._files:
            for tensor in self._tensors(path):
                copies.setdefault(tensor.name, []).append(tensor)
        merged = {}
        for name, file in index.items():
            if not any(x.path.name == file for x in copies.get(name, [])):
                raise UserError(
                    f"{self.folder / file} has no tensor {name}, which {INDEX_FILE} says it has; "
                    "fetch both again"
                )
        for name, (first, *others) in copies.items():
            for other in others:
                if not np.array_equal(self._raw(first), self._raw(other), equal_nan=True):
                    raise UserError(
                        f"{other.path}: tensor {name} differs from the one in {first.path.name}; "
                        "fetch both again"
                    )
            merged[name] = first
        return merged

    def rename(self, names: Mapping[str, str]) -> None:
        """Rename tensors whose old name exists and whose new name does not."""
        for old, new in names.items():
            if old in self.tensors and new not in self.tensors:
                self.tensors[new] = self.tensors.pop(old)

    def divide(self, names: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Divide the rows of tensors again, into these shapes, if their sum is the same."""
        if not all(name in self.tensors for name in names):
            return
        if all(self.tensors[name].shape == shapes[name] for name in names):
            return
        parts, start = [self.tensors[name] for name in names], 0
        if sum(x.shape[0] for x in parts) != sum(shapes[name][0] for name in names):
            return
        for name in names:
            rows = slice(start, start := start + shapes[name][0])
            shape = (shapes[name][0], *self.tensors[name].shape[1:])
            self.tensors[name] = replace(self.tensors[name], shape=shape)
            self._divided[name] = parts, rows

    def check_sizes(self, config: LanguageModelConfig) -> None:
        """Compare the sizes in the configuration with the files, before names are built or memory
        is allocated for them.

        Raises:
          UserError: they differ.
        """
        embedding = self.tensors.get(self.embedding)
        self.check(
            {self.embedding: (config.vocab_size, config.model_dim)},
            {} if embedding is None else {self.embedding: embedding},
        )
        stacked = next(name for name, _ in self._names.values() if "{" in name)
        pattern = re.escape(stacked.partition("{")[0]) + r"(\d+)\."
        matches = (re.match(pattern, name) for name in self.tensors)
        layers = {match[1] for match in matches if match}
        number = config.num_layers if "{}" in stacked else places_of(config)[-1]["mlp"] + 1
        if len(layers) != number:
            raise UserError(
                f"{self.folder}: {self._source} describes {number} layers, but the weights have "
                f"{len(layers)}; {self._remedy}, or choose another model"
            )

    def check_count(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse a model with a parameter larger than all tensors of the files."""
        total = sum(math.prod(x.shape) for x in self.tensors.values())
        for name, shape in shapes.items():
            if math.prod(shape) > total:
                raise UserError(
                    f"{self.folder}: {self._source} describes a parameter {name} of {[*shape]}, "
                    f"but all tensors have {total} values; {self._remedy}, or choose another model"
                )

    def _tensors(self, path: Path) -> list[Tensor]:
        tensors = []
        for name in self._files[path].keys():  # noqa: SIM118 - no mapping
            part = self._files[path].get_slice(name)
            dtype = part.get_dtype()
            if dtype not in DTYPES and not BUFFERS.search(name):
                raise UserError(
                    f"{path}: tensor {name} has dtype {dtype}, which is unsupported; choose a "
                    f"checkpoint in one of {', '.join(DTYPES)}"
                )
            tensors.append(Tensor(path, name, tuple(part.get_shape()), dtype))
        return tensors

    def check(
        self,
        expected: Mapping[str, tuple[int, ...]],
        tensors: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Compare names and shapes of the tensors, all when None, with those that the model needs.

        Raises:
          UserError: they differ; the message names a tensor.
        """
        tensors = self.tensors if tensors is None else tensors
        for name in sorted(expected.keys() ^ tensors.keys()):
            if name in expected:
                fix = "fetch the files again"
                if name == self.readout:
                    fix += ", or set tie_word_embeddings to true in config.json"
                raise UserError(f"{self.folder}: tensor {name} is missing; {fix}")
            raise UserError(
                f"{tensors[name].path}: tensor {name} is no part of the model that {self._source} "
                f"describes; {self._remedy}, or choose another model"
            )
        for name, shape in expected.items():
            if (tensor := tensors[name]).shape != shape:
                raise UserError(
                    f"{tensor.path}: tensor {name} has shape {[*tensor.shape]}, but {self._source} "
                    f"describes {[*shape]}; {self._remedy}, or choose another model"
                )

    def read(self, name: str) -> np.ndarray:
        """The values of a tensor, in float32.

        Raises:
          UserError: a value is NaN or infinite, and `allow_nonfinite` is not set.
        """
        value = self._values(tensor := self.tensors[name])
        if name in self._divided:
            parts, rows = self._divided[name]
            value = np.concatenate([self._values(part) for part in parts])[rows]
        if not self._allow_nonfinite:
            remedy = "fetch it again, or give --allow-nonfinite (allow_nonfinite=True in Python)"
            check_finite(value, tensor.name, tensor.path, remedy)
        return value

    def _values(self, tensor: Tensor) -> np.ndarray:
        return self._raw(tensor).astype(np.float32)

    def _raw(self, tensor: Tensor) -> np.ndarray:
        with reading_arrays(tensor.path, FETCH_AGAIN):
            return np.asarray(self._files[tensor.path].get_tensor(tensor.name))

    def check_tied(self) -> None:
        """Leave out the readout of a model with tied embeddings, if the files have it, too.

        Raises:
          UserError: the readout differs from the embedding.
        """
        ours, other = self.tensors.get(self.embedding), self.tensors.pop(self.readout, None)
        if ours is None or other is None:
            return
        if not np.array_equal(self._values(ours), self._values(other), equal_nan=True):
            raise UserError(
                f"{other.path}: tensor {other.name} differs from {ours.name}, but config.json says "
                "that both are tied; set tie_word_embeddings to false there"
            )


def _opened(folder: Path) -> tuple[dict[str, str] | None, dict[Path, Any]]:
    """The index of a folder, if any, and its files."""
    if not has_weights(folder):
        check_format(folder)
        raise UserError(
            f"{folder} has no weights; give a folder with {WEIGHTS_FILE} or {INDEX_FILE}"
        )
    index = weight_files(folder)
    names = [WEIGHTS_FILE] if index is None else sorted(set(index.values()))
    files = {}
    for path in (folder / name for name in names):
        with reading_arrays(path, FETCH_AGAIN):
            files[path] = safe_open(path, framework="numpy")
    return index, files


def check_format(path: Path) -> None:
    """Refuse a file or folder whose weights are in another format."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    folder = f"a folder with config.json and {WEIGHTS_FILE}"
    for file in files:
        if file.suffix == GGUF:
            raise UserError(f"{path} has a file of llama.cpp; give its path, {file}")
    for file in files:
        if file.suffix in (".bin", ".pt", ".pth"):
            raise UserError(
                f"{file} has the format of PyTorch, which is not read; give a folder with "
                f"{WEIGHTS_FILE} or {INDEX_FILE}"
            )
    if path.is_file():
        raise UserError(f"{path} is a file; give {folder}")
