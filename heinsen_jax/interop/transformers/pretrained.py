"""Conversion of pretrained models of the library transformers, in both directions."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from heinsen_jax.data import DataConfig, Tokenizer, save_tokenizer, start_ids, stop_ids
from heinsen_jax.data.config import MODEL
from heinsen_jax.data.tokenizer_files import (
    ADDED_TOKENS_FILE,
    GENERATION_FILE,
    SPECIAL_TOKENS_FILE,
    TEMPLATE_FILE,
    TEMPLATE_FOLDER,
)
from heinsen_jax.data.tokenizer_json import TOKENIZER_FILE, read_json
from heinsen_jax.data.tokenizer_pretrained import PretrainedTokenizer, pretrained_tokenizer
from heinsen_jax.data.tokenizer_tiktoken import TiktokenTokenizer
from heinsen_jax.errors import UserError, explain, extra_module
from heinsen_jax.interop.tensors import Names, entries, shapes_of, tensors_of
from heinsen_jax.interop.transformers.checkpoint import (
    DTYPES,
    GGUF,
    Checkpoint,
    StoredDtype,
    check_format,
)
from heinsen_jax.interop.transformers.families import family_of, text_part
from heinsen_jax.interop.transformers.family import IRRELEVANT, NOT_EXPORTED
from heinsen_jax.interop.transformers.matching import family_for
from heinsen_jax.interop.transformers.names import (
    DIVIDED,
    IGNORED,
    NAMES,
    OTHER_NAMES,
    TEXT_PREFIXES,
)
from heinsen_jax.interop.transformers.rewriting import with_output_gates
from heinsen_jax.models import LanguageModel, LanguageModelConfig
from heinsen_jax.models.config import Dtype
from heinsen_jax.models.conversion import without_lora
from heinsen_jax.pytrees import flatten_with_names
from heinsen_jax.runs.record import CONFIG_FILE
from heinsen_jax.runs.weights import SHARD_BYTES, has_weights, save_weights
from heinsen_jax.storage.buckets import local_path
from heinsen_jax.storage.files import check_new_folder, filling
from heinsen_jax.typing import JSON

__all__ = ["from_pretrained", "import_model", "to_pretrained"]

TRANSFORMERS_CONFIG = "config.json"
FETCHED = (TRANSFORMERS_CONFIG, "model*.safetensors", "model.safetensors.index.json", "tokenizer*")
FETCHED += (GENERATION_FILE, SPECIAL_TOKENS_FILE, ADDED_TOKENS_FILE)
FETCHED += (TEMPLATE_FILE, f"{TEMPLATE_FOLDER}/*.jinja")


def from_pretrained(
    name: str | Path,
    *,
    revision: str | None = None,
    on_host: bool = False,
    allow_nonfinite: bool = False,
    dtype: Dtype = "float32",
    param_dtype: Dtype | None = None,
) -> tuple[LanguageModel, PretrainedTokenizer | None]:
    """Load a model of transformers and its tokenizer.

    Args:
      name: a folder with `config.json` and `.safetensors`, a `.gguf` file of llama.cpp, or
        `owner/name` of a repository of the hub.
      revision: branch, tag or commit of the repository.
      on_host: whether the parameters are NumPy arrays in the memory of this host, instead of arrays
        on its first device.
      allow_nonfinite: whether weights may be NaN or infinite.
      dtype: dtype of activations in matrix products.
      param_dtype: dtype of the parameters, except for vectors, which are at least float32. When
        None: bfloat16 if the files have all of them in it, else float32, in both cases exactly.

    Returns:
      The model; and its tokenizer, or None without `tokenizer.json`.
      The tokenizer ends documents with the `eos_token` of `tokenizer_config.json`, and has the
      methods `apply_chat_template` and `encode_with_special_tokens`. Generation stops at any id in
      `eos_token_id` of `generation_config.json`, or else of `config.json`.

    Raises:
      UserError: the model is unsupported; or a file is missing, damaged, or does not match the
        others. Files are checked before weights are read.
    """
    folder, of_file = Path(name), None
    if folder.suffix == GGUF and folder.is_file():
        of_file = extra_module(f"{__package__}.gguf").Gguf(folder)
        path, values = folder, of_file.config()
    else:
        if folder.is_file() or (folder.is_dir() and not (folder / TRANSFORMERS_CONFIG).exists()):
            check_format(folder)
        if not folder.is_dir():
            folder = extra_module("heinsen_jax.interop.hub").download(str(name), revision, FETCHED)
            if not (folder / TRANSFORMERS_CONFIG).exists():
                raise UserError(
                    f"{name} holds no model of transformers ({TRANSFORMERS_CONFIG} is missing); "
                    f"choose another repository, or download a {GGUF} file and give its path"
                )
        path = folder / TRANSFORMERS_CONFIG
        values = text_part(read_json(path), path)
    family = family_of(values, path)
    try:
        config = dataclasses.replace(family.to_model(), dtype=dtype)
        config.abstract_layers()  # refuses sizes that do not fit
    except (ValueError, OverflowError) as error:
        raise UserError(f"{path}: {explain(error)}; correct that file") from None
    if of_file is None:
        tokenizer = pretrained_tokenizer(folder, Path(name).name, config.vocab_size)
    else:
        make = extra_module(f"{__package__}.gguf_tokenizer").tokenizer_of
        tokenizer = make(of_file, Path(name).stem)
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"{path}: vocab_size={config.vocab_size} is less than the {tokenizer.vocab_size} "
            "tokens of the tokenizer; remove the tokens that the model lacks"
        )
    checkpoint = _opened(folder, family.model_type, allow_nonfinite, of_file)
    checkpoint.check_sizes(config)
    if config.tie_embeddings:
        checkpoint.check_tied()
    arguments = checkpoint, family.model_type, config, param_dtype, on_host
    return _loaded(*arguments), tokenizer


def _opened(
    folder: Path, model_type: str, allow_nonfinite: bool, of_file: Any = None
) -> Checkpoint:
    return Checkpoint(
        folder,
        NAMES[model_type],
        of_file=of_file,
        text_prefix=TEXT_PREFIXES.get(model_type, ""),
        ignored=IGNORED.get(model_type, ()),
        allow_nonfinite=allow_nonfinite,
    )


def _loaded(
    checkpoint: Checkpoint,
    model_type: str,
    config: LanguageModelConfig,
    param_dtype: Dtype | None,
    on_host: bool,
) -> LanguageModel:
    config = dataclasses.replace(config, param_dtype=param_dtype or "bfloat16")
    graph, state = nnx.split(LanguageModel.abstract(config))
    leaves = flatten_with_names(state)
    checkpoint.check_count({name: x.shape for name, x in leaves.items()})
    published = NAMES[model_type]
    parameters = entries(published, config, leaves)
    others = entries({**published, **OTHER_NAMES.get(model_type, {})}, config, leaves)
    checkpoint.rename(
        {
            other[0]: name[0]
            for pair in zip(others, parameters, strict=True)
            for other, name in zip(*(x.layers for x in pair), strict=True)
            if other != name
        }
    )
    shapes = shapes_of(parameters, leaves)
    divided = DIVIDED.get(model_type, "")
    for layer in range(config.num_layers if divided else 0):
        names = [divided.format(layer).replace("*", x) for x in "qkv"]
        checkpoint.divide(names, shapes)
    checkpoint.check(shapes)
    if param_dtype is None:
        small = [x for x in parameters if leaves[x.path].dtype == jnp.bfloat16]
        names = {name for x in small for layer in x.layers for name in layer}
        if any(checkpoint.tensors[name].dtype != "BF16" for name in names):
            return _loaded(checkpoint, model_type, config, "float32", on_host)
    to_array = np.asarray if on_host else jnp.asarray
    values = [to_array(x.load(leaves[x.path], checkpoint.read)) for x in parameters]
    return nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), values))


def import_model(
    name: str | Path,
    workdir: str | Path,
    *,
    revision: str | None = None,
    allow_nonfinite: bool = False,
    param_dtype: Dtype | None = None,
) -> Path:
    """Write the configuration, the weights and the tokenizer of a model of transformers to a new
    folder, which the commands of this package accept as `--workdir`.

    The optimizer of its configuration is one for further training: AdamW with learning rates up to
    5e-5.

    Args:
      name: a folder, a `.gguf` file, or `owner/name` of a repository of the hub, as for
        `from_pretrained`.
      workdir: a new or empty folder.
      revision: branch, tag or commit of the repository.
      allow_nonfinite: whether weights may be NaN or infinite.
      param_dtype: dtype of the parameters, as for `from_pretrained`.

    Returns:
      The folder.

    Raises:
      UserError: as `from_pretrained`; or the model has no `tokenizer.json`, or the folder is not
        empty.
    """
    output = local_path(workdir, "--workdir")
    check_new_folder(output)
    if (Path(name) / TRANSFORMERS_CONFIG).exists() and not (Path(name) / TOKENIZER_FILE).exists():
        raise _without_tokenizer(name)  # before its weights are read
    model, tokenizer = from_pretrained(
        name,
        revision=revision,
        on_host=True,
        allow_nonfinite=allow_nonfinite,
        param_dtype=param_dtype,
    )
    if tokenizer is None:
        raise _without_tokenizer(name)
    length = min(filter(None, (DataConfig().sequence_length, model.config.max_length)))
    corpus = MODEL + (Path(name).resolve().name if Path(name).exists() else str(name))
    data = DataConfig(corpus=corpus, tokenizer=TOKENIZER_FILE, sequence_length=length)
    config = {
        "seed": 0,
        "model": dataclasses.asdict(model.config),
        "data": dataclasses.asdict(data),
        "optimizer": {"learning_rate": 5e-5, "end_learning_rate": 5e-6},
    }
    with filling(output) as partial:
        arrays = flatten_with_names(nnx.state(model, nnx.Param))
        save_weights(partial, arrays, step=0)
        (partial / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_tokenizer(tokenizer, partial)
    return output


def _without_tokenizer(name: str | Path) -> UserError:
    return UserError(
        f"{name} has no tokenizer.json; add the file, for example with save_pretrained of its "
        "tokenizer in transformers"
    )


def to_pretrained(
    model: LanguageModel,
    folder: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    like: str | Path | None = None,
    dtype: StoredDtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write a model for transformers, the inverse of `from_pretrained`; return the folder.

    Any model of a supported architecture can be written, for example one with block `llama` and
    attention `gqa` that this package trained. Low-rank additions are added to their matrices.
    A linearized Qwen 3 with layers of Gated DeltaNet is written as `qwen3_5_text`, a linearized
    Llama with layers of Mamba-2 as `granitemoehybrid`.

    Args:
      model: the model.
      folder: a new or empty folder.
      tokenizer: its tokenizer, which gives the ids of special tokens if `like` does not; null
        without both.
      like: folder of the original checkpoint. The model type, the dtype, and fields that do not
        change results, such as ids of special tokens, are copied from its `config.json`, and all
        fields from its `generation_config.json`, except for the ids that end generation, which are
        the tokenizer's.
      dtype: dtype of the tensors; when None, the dtypes in `like`, or float32 without it.
      shard_bytes: maximum size of a file.

    Raises:
      UserError: no supported model of transformers has this architecture; the dtype is unsupported,
        or a value is too large for it; the tokenizer cannot be converted to `tokenizer.json`; the
        folder is not empty; or it cannot be written.
    """
    output = local_path(folder, "folder")
    check_new_folder(output)
    path = None if like is None else Path(like) / TRANSFORMERS_CONFIG
    if path is not None and (not path.is_file() or "model_type" not in read_json(path)):
        raise UserError(
            f"like (--like) {like}: not a checkpoint of transformers; give the local folder of the "
            "original, with its config.json"
        )
    others = {} if path is None else text_part(read_json(path), path)
    only = None if path is None else family_of(others, path).model_type
    if isinstance(tokenizer, TiktokenTokenizer):
        tokenizer = tokenizer.to_json()
    if any("lora" in name for name, _ in model.parameters()):
        model = without_lora(model)
    if only in (None, "qwen3_5_text"):
        model = with_output_gates(model) or model
    family = family_for(model.config, only)
    stored = dtype or others.get("dtype") or others.get("torch_dtype") or "float32"
    if stored not in (known := get_args(StoredDtype)):
        source = "" if dtype else f"{path}: "
        raise UserError(f"{source}dtype={stored!r} is unsupported; give one of {', '.join(known)}")
    dtypes: dict[str, str] = {}
    if like is not None and dtype is None and has_weights(Path(like)):
        original = _opened(Path(like), family.model_type, True)
        dtypes = {name: DTYPES[x.dtype] for name, x in original.tensors.items()}
    arrays = _tensors(model, NAMES[family.model_type], str(stored), dtypes)
    fields: dict[str, JSON] = {k: v for k, v in others.items() if k in IRRELEVANT - NOT_EXPORTED}
    fields |= {"architectures": [family.architecture], "model_type": family.model_type}
    if like is None:  # null, since transformers has defaults for absent ids
        start = () if tokenizer is None else start_ids(tokenizer)
        fields["bos_token_id"] = start[0] if start else None
        fields["eos_token_id"] = None if tokenizer is None else _ends(tokenizer)
        fields["pad_token_id"] = None
    fields |= family.to_json() | {"torch_dtype": stored}
    fields.pop("dtype", None)
    with filling(output) as partial:
        save_weights(partial, arrays, step=0, shard_bytes=shard_bytes, framework="pt")
        contents = {TRANSFORMERS_CONFIG: fields, GENERATION_FILE: _generation(like, tokenizer)}
        for file, content in contents.items():
            if content:
                text = json.dumps(content, indent=2, sort_keys=True) + "\n"
                (partial / file).write_text(text)
        if tokenizer is not None:
            tokenizer.save(partial)
    return output


def _generation(like: str | Path | None, tokenizer: Tokenizer | None) -> dict[str, JSON]:
    """The content of `generation_config.json`: the original's, if any, with the tokenizer's ids."""
    path = None if like is None else Path(like) / GENERATION_FILE
    fields: dict[str, JSON] = read_json(path) if path is not None and path.exists() else {}
    if tokenizer is not None:
        fields["eos_token_id"] = _ends(tokenizer)
    return fields


def _ends(tokenizer: Tokenizer) -> int | list[JSON]:
    """The tokens that end generation, as transformers reads them."""
    first, *others = stop_ids(tokenizer)
    return [first, *others] if others else first


def _tensors(
    model: LanguageModel, names: Names, dtype: str, dtypes: Mapping[str, str]
) -> dict[str, np.ndarray]:
    """All tensors in transformers, by name; of a dtype, if `dtypes` does not have theirs."""
    leaves = flatten_with_names(nnx.state(model, nnx.Param))

    def stored(name: str, value: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            # in the order of the file, so that writing does not copy it again
            tensor = np.asarray(value, kind := dtypes.get(name, dtype), order="C")
        if np.any(np.isinf(tensor.astype(np.float32)) & np.isfinite(value)):
            raise UserError(f"dtype={kind}: {name} exceeds its range; choose float32")
        return tensor

    return tensors_of(entries(names, model.config, leaves), leaves, stored)
