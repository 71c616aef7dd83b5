"""Read GGUF files of llama.cpp as checkpoints of transformers.

Tensors are dequantized by the library gguf when they are read.
"""

import contextlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFReader, dequantize, get_tensor_name_map

from heinsen_jax.errors import UserError
from heinsen_jax.interop.transformers.names import NAMES
from heinsen_jax.typing import JSON

ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
    "gpt2": MODEL_ARCH.GPT2,
}
DTYPES = {GGMLQuantizationType.F16: "F16", GGMLQuantizationType.BF16: "BF16"}
SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
GPT2_SIZES = {
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "block_count": "n_layer",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}
"""Fields of `config.json` by the names of fields of an architecture."""
DEPTHS = "attention.key_length", "attention.value_length", "rope.dimension_count"
SCALING = "rope.scaling.type", "rope.scaling.factor"
IRRELEVANT = {"vocab_size", "rope.scaling.finetuned", "rope.scaling.original_context_length"}
FREQUENCIES = "rope_freqs.weight"
"""Tensor of the factors by which Llama 3 divides its rotary frequencies."""


DAMAGED = (OSError, ValueError, TypeError, IndexError, KeyError, OverflowError, NotImplementedError)
"""Errors of the library for files with other content than it expects."""


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Convert errors, in a block that only reads a file, to `UserError`."""
    try:
        yield
    except UserError:
        raise
    except DAMAGED as error:
        raise UserError(
            f"{path} is damaged or of an unsupported kind ({type(error).__name__}: {error}); fetch "
            "it again, or choose the files of the original model"
        ) from None


class Gguf:
    """A file, with the tensors and the fields that transformers has for its model.

    Tensors are read one by one, with the interface of `safetensors.safe_open`.

    Raises:
      UserError: the file is damaged, or its model is unsupported; the message names the field.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with reading(path):
            self._reader = GGUFReader(path)
            self.architecture = self.field("general.architecture")
            if self.architecture not in ARCHITECTURES:
                raise UserError(
                    f"{path}: general.architecture={self.architecture!r} is unsupported; choose "
                    f"one of {', '.join(ARCHITECTURES)}, or the files of the original model"
                )
            if self.field("split.count", 1) > 1:
                raise UserError(f"{path} is a part of a model; join them with llama-gguf-split")
            self._by_name = {x.name: x for x in self._reader.tensors}
            layers = {x.split(".")[1] for x in self._by_name if x.startswith("blk.")}
            if (count := self._of_model("block_count")) != len(layers):
                raise UserError(
                    f"{path}: block_count={count!r}, but its tensors have {len(layers)} layers; "
                    "fetch it again"
                )
            self._tensors = {
                self._name(name): x for name, x in self._by_name.items() if name != FREQUENCIES
            }

    def field(self, name: str, default: Any = ...) -> Any:
        """A field of the file.

        Raises:
          UserError: it is missing, and no default is given.
        """
        with reading(self.path):
            if (field := self._reader.get_field(name)) is not None:
                return field.contents()
        if default is ...:
            raise UserError(f"{self.path}: {name} is missing; fetch the file again")
        return default

    def _of_model(self, name: str, default: Any = ...) -> Any:
        """A field of the architecture."""
        return self.field(f"{self.architecture}.{name}", default)

    def config(self) -> dict[str, JSON]:
        """The fields of a `config.json`."""
        prefix, is_gpt2 = f"{self.architecture}.", self.architecture == "gpt2"
        sizes = GPT2_SIZES if is_gpt2 else SIZES
        known = {*sizes, *DEPTHS, *SCALING, *IRRELEVANT}
        for name in self._reader.fields:
            if name.startswith(prefix) and name.removeprefix(prefix) not in known:
                raise UserError(
                    f"{self.path}: {name}={self.field(name)!r} is unknown, and may change "
                    "results; choose the files of the original model"
                )
        fields: dict[str, JSON] = {
            name: self._shortest_decimal(value)
            for ours, name in sizes.items()
            if (value := self._of_model(ours, None)) is not None
        }
        names = self._by_name
        if (embedding := names.get("token_embd.weight")) is None:
            raise UserError(f"{self.path}: tensor token_embd.weight is missing; fetch it again")
        fields |= {
            "model_type": self.architecture,
            "vocab_size": int(embedding.shape[-1]),
            "tie_word_embeddings": "output.weight" not in names,
        }
        if is_gpt2:
            return fields
        depths = {self._of_model(name, None) for name in DEPTHS} - {None}
        if len(depths) > 1:
            raise UserError(f"{self.path}: {', '.join(DEPTHS)} differ, which is unsupported")
        if depths and self.architecture != "qwen2":
            fields["head_dim"] = depths.pop()
        if self.architecture == "llama":
            fields["attention_bias"] = "blk.0.attn_q.bias" in names
            fields["mlp_bias"] = "blk.0.ffn_up.bias" in names
        return fields | {"rope_scaling": self._rope_scaling()}

    @staticmethod
    def _shortest_decimal(value: Any) -> Any:
        """The shortest decimal of a number of float32: 1e-5 is stored as 9.99999975e-06."""
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def _rope_scaling(self) -> JSON:
        kind, factor = (self._of_model(name, None) for name in SCALING)
        if kind is None and factor not in (None, 0, 1):
            kind = "linear"  # the default of llama.cpp
        divisors = self._by_name.get(FREQUENCIES)
        if kind not in (None, "none"):
            if kind != "linear":
                raise UserError(
                    f"{self.path}: {SCALING[0]}={kind!r} is unsupported; choose the files of the "
                    "original model"
                )
            if divisors is not None:
                raise UserError(f"{self.path}: {FREQUENCIES} with {SCALING[0]} is unsupported")
            return {"rope_type": kind, "factor": self._shortest_decimal(factor)}
        if divisors is None:
            return None
        given = divisors.data
        base, depth = self._of_model("rope.freq_base", 1e4), 2 * given.size
        waves = 2 * np.pi * base ** (2 * np.arange(given.size) / depth)
        smooth = np.clip((8192 / waves - 1) / (4 - 1), 0, 1)  # equations of transformers' `llama3`
        factor = self._shortest_decimal(float(given.max()))
        expected = 1 / ((1 - smooth) / factor + smooth)
        if not np.isfinite(factor) or not np.allclose(expected, given, rtol=1e-4):
            raise UserError(
                f"{self.path}: the factors in {FREQUENCIES} do not belong to Llama 3; choose "
                "the files of the original model"
            )
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }

    @cached_property
    def _names(self) -> dict[str, str]:
        """Modules in transformers by their names in the file."""
        layers = self._of_model("block_count")
        names = get_tensor_name_map(ARCHITECTURES[self.architecture], layers)
        modules = (
            x.replace("*", part) for x, _ in NAMES[self.architecture].values() for part in "qkv"
        )
        every = {x.format(layer) for x in modules for layer in range(layers)}
        return {ours: x for x in every if (ours := names.get_name(x)) is not None}

    def _name(self, name: str) -> str:
        module, _, leaf = name.rpartition(".")
        return f"{self._names[module]}.{leaf}" if module in self._names else name

    def keys(self) -> Iterator[str]:
        yield from self._tensors

    def get_slice(self, name: str) -> "Part":
        return Part(self, name)

    def get_tensor(self, name: str) -> np.ndarray:
        """The values of a tensor in the layout of transformers."""
        tensor = self._tensors[name]
        value = tensor.data
        if tensor.tensor_type not in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
            with reading(self.path):
                value = dequantize(value, tensor.tensor_type)
        heads = {"q_proj": "attention.head_count", "k_proj": "attention.head_count_kv"}
        module = name.rpartition(".")[0].rpartition(".")[2]
        if self.architecture == "llama" and module in heads:
            # llama.cpp has rotated features as adjacent pairs.
            number = self._of_model(heads[module], self._of_model("attention.head_count"))
            pairs = value.reshape(number, -1, 2, *value.shape[1:])
            return pairs.swapaxes(1, 2).reshape(value.shape)
        is_convolution = self.architecture == "gpt2" and module.startswith("c_")
        return value.T if is_convolution else value


class Part:
    """Shape and dtype of a tensor, with the interface of a slice of `safetensors`."""

    def __init__(self, file: Gguf, name: str) -> None:
        tensor = file._tensors[name]
        self._shape = [int(x) for x in reversed(tensor.shape)]
        module = name.rpartition(".")[0].rpartition(".")[2]
        if file.architecture == "gpt2" and module.startswith("c_"):
            self._shape.reverse()
        self._dtype = DTYPES.get(tensor.tensor_type, "F32")

    def get_shape(self) -> list[int]:
        return self._shape

    def get_dtype(self) -> str:
        return self._dtype
