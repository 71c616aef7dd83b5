"""Import and export of weights by PyTorch names, and in files; tests/models checks outputs."""

import collections
import dataclasses
import itertools
import os
import pickle
import sys
import types
import zipfile

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from heinsen_jax.errors import UserError
from heinsen_jax.interop.torch import from_file, from_state_dict, to_file, to_state_dict
from heinsen_jax.models import LanguageModelConfig, Layers
from heinsen_jax.pytrees import flatten_with_names
from tests.models.small import random_model


def arrays(**changes):
    shapes = {
        "embed.weight": (11, 8),
        "embed_pos.dense.weight": (16, 8),
        "embed_pos.dense.bias": (16,),
        "layers.0.feedforward1.0.weight": (8,),
        "layers.0.feedforward1.0.bias": (8,),
        "layers.0.feedforward1.1.weight": (2 * (3 + 3 + 5), 8),
        "layers.0.feedforward1.1.bias": (22,),
        "layers.0.feedforward2.0.weight": (16, 10),
        "layers.0.feedforward2.0.bias": (16,),
        "layers.0.feedforward2.2.weight": (8, 8),
        "lnorm.weight": (8,),
        "lnorm.bias": (8,),
    }
    rng = np.random.default_rng(0)
    drawn = {name: rng.standard_normal(shape).astype("f") for name, shape in shapes.items()}
    return drawn | changes


SMALL = LanguageModelConfig(vocab_size=11, model_dim=8, num_layers=3, num_heads=2, value_depth=5)


def test_sizes_follow_from_shapes():
    config = from_state_dict(arrays(), num_heads=2).config
    assert (config.key_depth, config.value_depth) == (3, 5)
    assert (config.vocab_size, config.model_dim, config.num_layers) == (11, 8, 1)


@pytest.mark.parametrize("name", ["lnorm.bias", "embed.weight"])
def test_a_missing_entry_is_named(name):
    without = arrays()
    del without[name]
    with pytest.raises(ValueError, match=f"'{name}' is missing"):
        from_state_dict(without, num_heads=2)


def test_an_unknown_entry_is_named():
    with pytest.raises(ValueError, match=r"'head\.weight' is not part of"):
        from_state_dict(arrays(**{"head.weight": np.ones(3)}), num_heads=2)


def test_an_entry_of_wrong_shape_is_named():
    with pytest.raises(ValueError, match=r"'embed_pos\.dense\.weight' has shape \(15, 8\)"):
        from_state_dict(arrays(**{"embed_pos.dense.weight": np.ones((15, 8))}), num_heads=2)


def test_an_entry_of_wrong_shape_in_a_layer_is_named():
    given = arrays()
    more = {name.replace(".0.", ".1.", 1): x for name, x in given.items() if ".0." in name}
    given |= more | {"layers.1.feedforward2.2.weight": np.ones((8, 7))}
    with pytest.raises(
        ValueError, match=r"'layers\.1\.feedforward2\.2\.weight' has shape \(8, 7\)"
    ):
        from_state_dict(given, num_heads=2)


@pytest.mark.parametrize("num_heads", [0, -1])
def test_heads_are_at_least_one(num_heads):
    with pytest.raises(ValueError, match=f"num_heads={num_heads} does not fit"):
        from_state_dict(arrays(), num_heads=num_heads)


def test_an_invalid_number_of_heads_is_refused():
    with pytest.raises(ValueError, match="num_heads=3 does not fit"):
        from_state_dict(arrays(), num_heads=3)


def assert_same(have, want):
    assert have.keys() == want.keys()
    for name in want:
        np.testing.assert_array_equal(have[name], want[name], err_msg=name)
        assert have[name].dtype == want[name].dtype


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_export_and_import(dtype):
    with jax.enable_x64(dtype == "float64"):
        given = {name: x.astype(dtype) for name, x in arrays().items()}
        assert_same(to_state_dict(from_state_dict(given, num_heads=2)), given)


def test_matrices_are_transposed():
    """PyTorch's linear layers have the transpose of the kernels of Flax."""
    given = arrays()
    model = from_state_dict(given, num_heads=2)
    layer = model.blocks[0].attention
    for name, linear in {
        "embed_pos.dense.weight": model.position.dense,
        "layers.0.feedforward1.1.weight": layer.project,
        "layers.0.feedforward2.0.weight": layer.gate,
        "layers.0.feedforward2.2.weight": layer.output,  # a square
    }.items():
        kernel = np.asarray(linear.kernel[...]).reshape(given[name].shape[::-1])
        np.testing.assert_array_equal(kernel, given[name].T, err_msg=name)
        np.testing.assert_array_equal(to_state_dict(model)[name], given[name], err_msg=name)


def test_import_and_export():
    model = random_model(SMALL)
    again = from_state_dict(to_state_dict(model), num_heads=2)
    assert dataclasses.replace(again.config, key_depth=None) == SMALL
    have, want = (flatten_with_names(nnx.state(x, nnx.Param)) for x in (again, model))
    assert_same(have, want)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block": "standard"}, r"model\.block='standard': the published PyTorch model has"),
        ({"attention": "softmax"}, r"model\.attention='softmax'"),
        ({"attention": Layers("log", options={"values": "linear"})}, r"model\.attention=Layers"),
        ({"convolution_size": 3}, r"model\.convolution_size=3"),
    ],
)
def test_other_models_cannot_be_exported(fields, message):
    model = random_model(dataclasses.replace(SMALL, **fields))
    with pytest.raises(ValueError, match=message):
        to_state_dict(model)


def test_other_entries_are_ignored():
    options = {"attention": Layers("log", options={"implementation": "scan"}), "remat": True}
    to_state_dict(random_model(dataclasses.replace(SMALL, **options)))


def test_safetensors(tmp_path):
    model = from_state_dict(arrays(), num_heads=2)
    to_file(model, tmp_path / "model.safetensors")
    again = from_file(tmp_path / "model.safetensors", num_heads=2)
    assert_same(to_state_dict(again), arrays())
    with pytest.raises(ValueError, match=r"model\.pt must end in \.safetensors"):
        to_file(model, tmp_path / "model.pt")


class Storage:
    """Stand-in for PyTorch's class in `save_as_torch`."""

    def __init__(self, kind, array):
        self.kind, self.array = kind, array


def save_as_torch(path, tree, monkeypatch, byteorder="little"):
    """Write arrays like `torch.save`, from its specification: a pickle of views of storages."""
    torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
    torch._utils, kinds, storages = utils, {}, {}
    for kind, name in {"f": "FloatStorage", "d": "DoubleStorage", "E": "BFloat16Storage"}.items():
        kinds[kind] = type(name, (), {"__module__": "torch"})
        setattr(torch, name, kinds[kind])

    def rebuild(*_):
        raise NotImplementedError

    rebuild.__module__, rebuild.__qualname__ = "torch._utils", "_rebuild_tensor_v2"
    utils._rebuild_tensor_v2 = rebuild
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch", torch)
        patch.setitem(sys.modules, "torch._utils", utils)

        class Pickler(pickle.Pickler):
            def persistent_id(self, obj):
                if not isinstance(obj, Storage):
                    return None
                key = str(len(storages))
                order = "<" if byteorder == "little" else ">"
                kept = obj.array.astype(obj.array.dtype.newbyteorder(order))
                storages[key] = kept.tobytes()
                return "storage", kinds[obj.kind], key, "cpu", obj.array.size

            def reducer_override(self, obj):
                if not isinstance(obj, np.ndarray):
                    return NotImplemented
                kind = obj.dtype.char
                if obj.ndim == 2:  # a transposed view, three numbers into its storage
                    flat = np.concatenate([np.zeros(3, obj.dtype), obj.T.ravel()])
                    view = Storage(kind, flat), 3, obj.shape, (1, obj.shape[0])
                else:
                    view = Storage(kind, obj.ravel()), 0, obj.shape, (1,) * obj.ndim
                return rebuild, (*view, False, collections.OrderedDict())

        with zipfile.ZipFile(path, "w") as archive:
            with archive.open("archive/data.pkl", "w") as file:
                Pickler(file, protocol=2).dump(tree)
            archive.writestr("archive/byteorder", byteorder)
            for key, content in storages.items():
                archive.writestr(f"archive/data/{key}", content)


@pytest.mark.parametrize(
    ("dtype", "byteorder"),  # NumPy has no big-endian bfloat16
    [*itertools.product(("float32", "float64"), ("little", "big")), ("bfloat16", "little")],
)
def test_files_of_torch(dtype, byteorder, tmp_path, monkeypatch):
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    given = collections.OrderedDict((name, x.astype(dtype)) for name, x in arrays().items())
    given._metadata = {"": {"version": 1}}  # as in modules
    save_as_torch(tmp_path / "model.pt", given, monkeypatch, byteorder)
    with jax.enable_x64(dtype == np.float64):
        model = from_file(tmp_path / "model.pt", num_heads=2)
        wanted = {x: y.astype("float32" if dtype.itemsize < 4 else dtype) for x, y in given.items()}
        assert_same(to_state_dict(model), wanted)


def test_a_file_with_more_than_a_state_dict_is_described(tmp_path, monkeypatch):
    save_as_torch(tmp_path / "run.pt", {"model": arrays(), "step": 7}, monkeypatch)
    with pytest.raises(
        UserError, match=r"run\.pt holds no state dict.*'model', 'step'.*state_dict"
    ):
        from_file(tmp_path / "run.pt", num_heads=2)


def test_code_in_a_file_is_not_run(tmp_path):
    class Harmful:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    with zipfile.ZipFile(tmp_path / "model.pt", "w") as archive:
        archive.writestr("x/data.pkl", pickle.dumps({"embed.weight": Harmful()}))
    with pytest.raises(UserError, match=r"holds \w+\.mkdir, which is not read"):
        from_file(tmp_path / "model.pt", num_heads=2)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
@pytest.mark.parametrize("content", [None, b"", b"nonsense" * 100])
def test_a_file_that_cannot_be_read_is_named(name, content, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=name):
        from_file(tmp_path / name, num_heads=2)


def test_a_damaged_storage_is_detected(tmp_path, monkeypatch):
    save_as_torch(tmp_path / "model.pt", arrays(), monkeypatch)
    with (
        zipfile.ZipFile(tmp_path / "model.pt") as whole,
        zipfile.ZipFile(tmp_path / "short.pt", "w") as short,
    ):
        for name in whole.namelist():
            content = whole.read(name)
            short.writestr(name, content[:-8] if name.endswith("data/0") else content)
    with pytest.raises(UserError, match=r"short\.pt is damaged \(storage 0 holds"):
        from_file(tmp_path / "short.pt", num_heads=2)
