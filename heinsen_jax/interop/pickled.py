"""Arrays from PyTorch's .pt files, without PyTorch and without executing code from them.

Such a file is a zip archive: `data.pkl`, a pickle of the structure in which each tensor is a view
of a storage, and a member `data/<key>` for every storage. Pickles may call any function and set the
state of any object; only functions that construct tensors in dictionaries and lists are allowed
here. Views are checked against their storage, as by `torch.load(..., weights_only=True)`.
"""

import collections
import io
import math
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

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


_MAX_REPEATED = 2**20
"""Number of elements up to which a tensor may be larger than its storage, as after `expand`."""


_Unpickler: Any = pickle._Unpickler
"""The unpickler in Python: the one in C allocates as many entries as the index of a memo says, and
its handling of the opcode BUILD cannot be replaced."""


class _DamagedError(Exception):
    """A fault of a file, in words without text from the file."""


def read_pickled(path: Path) -> object:
    """Load a file of `torch.save`, with read-only NumPy arrays instead of tensors.

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
    except Exception as error:  # a malformed pickle may raise any
        reason = error if isinstance(error, _DamagedError) else f"{type(error).__name__} in pickle"
        raise UserError(f"{path} is damaged ({reason}); fetch or save it again") from None


class _Reader(_Unpickler):
    def __init__(self, path: Path, archive: zipfile.ZipFile) -> None:
        (name,) = [x for x in archive.namelist() if x.split("/")[1:] == ["data.pkl"]] or [""]
        if not name:
            raise zipfile.BadZipFile
        self._path, self._archive, self._folder = path, archive, name.removesuffix("data.pkl")
        self._storages: dict[tuple[str, np.dtype], np.ndarray] = {}
        has_order = f"{self._folder}byteorder" in archive.namelist()
        orders: dict[bytes, Literal["<", ">"]] = {b"little": "<", b"big": ">"}
        self._order: Literal["<", ">"] = orders[
            self._member("byteorder") if has_order else b"little"
        ]
        super().__init__(io.BytesIO(self._member("data.pkl")))

    def _member(self, name: str) -> bytes:
        info = self._archive.getinfo(self._folder + name)
        if info.compress_type != zipfile.ZIP_STORED:  # may decompress to more than the memory
            raise self._refusal("compressed parts")
        return self._archive.read(info)

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
        raise self._refusal(_printable(f"{module_name}.{global_name}"))

    def _refusal(self, what: str) -> UserError:
        return UserError(
            f"{self._path} holds {what}, which is not read; save the model's state_dict() alone, "
            "torch.save(model.state_dict(), path)"
        )

    def _build(self) -> None:
        """Set the attributes of a dictionary. The state of a NumPy object would not be checked."""
        state = self.stack.pop()
        if not isinstance(self.stack[-1], collections.OrderedDict) or not isinstance(state, dict):
            raise self._refusal("the state of an object")
        self.stack[-1].__dict__.update(state)

    dispatch = _Unpickler.dispatch | {pickle.BUILD[0]: _build}

    def persistent_load(self, pid: object, /) -> np.ndarray:
        match pid:
            case ("storage", np.dtype() as dtype, str(key), _, int(number)) if number >= 0:
                pass
            case _:
                raise _DamagedError("a storage is not described by its dtype, key and size")
        if (key, dtype) not in self._storages:
            content = self._member(f"data/{key}")
            if len(content) < number * dtype.itemsize:
                length = len(content) // dtype.itemsize
                raise _DamagedError(f"storage {_printable(key)} holds {length} of {number} numbers")
            stored = np.ndarray(number, dtype.newbyteorder(self._order), content)
            self._storages[key, dtype] = stored.astype(dtype, copy=False)
        return self._storages[key, dtype]

    def _view(
        self,
        storage: object,
        offset: object,
        size: object,
        stride: object,
        _requires_grad: object = False,
        _hooks: object = None,
        marks: object = None,
    ) -> np.ndarray:
        if marks:  # they mean that the stored numbers are to be negated or conjugated
            names = [x for x in marks if isinstance(x, str)] if isinstance(marks, dict) else []
            raise self._refusal(_printable(f"a tensor with marks {', '.join(names)}"))
        if not (
            isinstance(storage, np.ndarray)
            and isinstance(size, tuple)
            and isinstance(stride, tuple)
            and len(size) == len(stride)
            and all(type(x) is int and x >= 0 for x in (offset, *size, *stride))
        ):
            raise _DamagedError("a tensor's offset, size or stride is negative or no integer")
        assert isinstance(offset, int)
        shape, count = str(size)[:80], math.prod(size)
        if count == 0:
            return np.zeros(size, storage.dtype)
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if last >= len(storage):
            raise _DamagedError(f"a tensor of shape {shape} is larger than its storage")
        if count > max(len(storage), _MAX_REPEATED):
            raise self._refusal(f"a tensor of shape {shape} that repeats fewer numbers")
        # a single row may have any stride
        strides = [step * storage.itemsize * (n > 1) for n, step in zip(size, stride, strict=True)]
        return np.ndarray(size, storage.dtype, storage, offset * storage.itemsize, strides)


def _printable(text: str) -> str:
    """Text of a file, short and without control characters."""
    return ascii(text)[1:-1][:80]
