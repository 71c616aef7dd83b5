"""Arrays from PyTorch's .pt files, without PyTorch and without executing code from them.

Such a file is a zip archive: `data.pkl`, a pickle of the structure in which each tensor is a view
of a storage, and a member `data/<key>` for every storage. Pickles may call any function; only
those that construct tensors are allowed here, and all others are refused.
"""

import collections
import io
import math
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np

from heinsen_jax.errors import UserError

_STORAGES = {
    "FloatStorage": np.float32,
    "DoubleStorage": np.float64,
    "HalfStorage": np.float16,
    "BFloat16Storage": ml_dtypes.bfloat16,
    "LongStorage": np.int64,
    "IntStorage": np.int32,
    "ShortStorage": np.int16,
    "CharStorage": np.int8,
    "ByteStorage": np.uint8,
    "BoolStorage": np.bool_,
}


def read_pickled(path: Path) -> object:
    """Load a file of `torch.save`, with NumPy arrays instead of tensors.

    Raises:
      UserError: the file is not of `torch.save`, is damaged, or has anything but tensors in
        dictionaries and lists.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return _Reader(path, archive).load()
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); give another file") from None
    except zipfile.BadZipFile:
        raise UserError(
            f"{path} is not a file of torch.save, or damaged, or older than PyTorch 1.6; save it "
            "again, or as .safetensors"
        ) from None
    except (KeyError, ValueError, TypeError, EOFError, pickle.UnpicklingError) as error:
        raise UserError(f"{path} is damaged ({error}); fetch or save it again") from None


class _Reader(pickle.Unpickler):
    def __init__(self, path: Path, archive: zipfile.ZipFile) -> None:
        (name,) = [x for x in archive.namelist() if x.split("/")[1:] == ["data.pkl"]] or [""]
        if not name:
            raise zipfile.BadZipFile
        self._path, self._archive, self._folder = path, archive, name.removesuffix("data.pkl")
        self._little = self._byte_order() == b"little"
        super().__init__(io.BytesIO(archive.read(name)))

    def _byte_order(self) -> bytes:
        name = f"{self._folder}byteorder"
        return self._archive.read(name) if name in self._archive.namelist() else b"little"

    def find_class(self, module_name: str, global_name: str, /) -> Callable[..., object] | np.dtype:
        match module_name, global_name:
            case "collections", "OrderedDict":
                return collections.OrderedDict
            case "torch._utils", "_rebuild_tensor_v2":
                return self._view
            case "torch._utils", "_rebuild_parameter":
                return lambda tensor, *_: tensor
            case "torch", _ if global_name in _STORAGES:
                return np.dtype(_STORAGES[global_name])
        raise self._refusal(f"{module_name}.{global_name}")

    def _refusal(self, what: str) -> UserError:
        return UserError(
            f"{self._path} holds {what}, which is not read; save the model's state_dict() alone, "
            "torch.save(model.state_dict(), path)"
        )

    def persistent_load(self, pid: tuple[str, np.dtype, str, str, int], /) -> np.ndarray:
        _, dtype, key, _, number = pid
        content = self._archive.read(f"{self._folder}data/{key}")
        order = "<" if self._little else ">"
        storage = np.frombuffer(content, dtype.newbyteorder(order)).astype(dtype)
        if len(storage) < number:
            raise ValueError(f"storage {key} holds {len(storage)} of {number} numbers")
        return storage

    def _view(
        self,
        storage: np.ndarray,
        offset: int,
        size: tuple[int, ...],
        stride: tuple[int, ...],
        _requires_grad: bool = False,
        _hooks: dict[str, object] | None = None,
        marks: dict[str, bool] | None = None,
    ) -> np.ndarray:
        if marks:  # they mean that the stored numbers are to be negated or conjugated
            raise self._refusal(f"a tensor with {marks}")
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if math.prod(size) and not 0 <= offset <= last < len(storage):
            raise ValueError(f"a tensor of shape {tuple(size)} is larger than its storage")
        steps = [step * storage.itemsize for step in stride]
        return np.lib.stride_tricks.as_strided(storage[offset:], size, steps).copy()
