"""Crafted `.pt` files: none is read outside its storages, crashes or fills the memory."""

import collections
import pickle
import zipfile

import ml_dtypes
import numpy as np
import pytest

from heinsen_jax.errors import UserError
from heinsen_jax.interop.pickled import read_pickled

NUMBERS = np.arange(6, dtype="<f4")
HUGE = 2**62


class Name:
    """A global of a pickle."""

    def __init__(self, name: str):
        self.module, self.name = name.rsplit(".", 1)


class Call:
    """The result of a global, called with arguments; then its state."""

    def __init__(self, name: str, *arguments, state=None):
        self.name, self.arguments, self.state = name, arguments, state


class Storage:
    def __init__(self, key="0", number: object = 6, kind="FloatStorage"):
        self.pid = "storage", Name(f"torch.{kind}"), key, "cpu", number


def dumps(value: object) -> bytes:
    """The opcodes of a value, without the frame of a pickle."""
    match value:
        case Name():
            return f"c{value.module}\n{value.name}\n".encode()
        case Storage():
            return dumps(value.pid) + b"Q"
        case Call():
            called = dumps(Name(value.name)) + dumps(value.arguments) + b"R"
            return called if value.state is None else called + dumps(value.state) + b"b"
        case tuple():
            return b"(" + b"".join(map(dumps, value)) + b"t"
        case dict():
            pairs = [x for pair in value.items() for x in pair]
            return b"}(" + b"".join(map(dumps, pairs)) + b"u"
        case bytes():
            return value
        case _:
            return pickle.dumps(value, protocol=2)[2:-1]


def write(path, value: object, content: bytes = NUMBERS.tobytes(), **options):
    with zipfile.ZipFile(path, "w", **options) as archive:
        archive.writestr("x/data.pkl", b"\x80\x02" + dumps(value) + b".")
        archive.writestr("x/data/0", content)
    return path


def view(offset, size, stride, storage: object = None, *rest):
    storage = Storage() if storage is None else storage
    return Call("torch._utils._rebuild_tensor_v2", storage, offset, size, stride, *rest)


@pytest.mark.parametrize(
    ("offset", "size", "stride", "wanted"),
    [
        (0, (2, 3), (3, 1), NUMBERS.reshape(2, 3)),
        (0, (3, 2), (1, 3), NUMBERS.reshape(2, 3).T),
        (1, (2, 2), (3, 1), [[1, 2], [4, 5]]),
        (5, (), (), 5),
        (5, (1, 1), (HUGE, HUGE), [[5]]),
        (2, (3, 2), (0, 1), [[2, 3]] * 3),
        (1, (9,), (0,), [1] * 9),
        (0, (0, 3), (3, 1), np.zeros((0, 3))),
        (99, (3, 0), (HUGE, 7), np.zeros((3, 0))),
        (0, (3, 2), (2, 1), NUMBERS.reshape(3, 2)),
    ],
)
def test_views_within_the_storage_are_read(offset, size, stride, wanted, tmp_path):
    found = read_pickled(write(tmp_path / "x.pt", {"x": view(offset, size, stride)}))
    assert isinstance(found, dict)
    np.testing.assert_array_equal(found["x"], np.asarray(wanted, "f4"))
    assert found["x"].dtype == np.float32


NEGATIVE, LARGER = "negative or no integer", "larger than its storage"
VIEWS = [
    ((0, (2, 3), (3, -1)), NEGATIVE),
    ((5, (2, 3), (-3, -1)), NEGATIVE),  # inside of the storage: torch refuses it, too
    ((0, (50_000,), (-1,)), NEGATIVE),
    ((3, (2, 2), (HUGE, -HUGE)), NEGATIVE),
    ((-1, (1,), (1,)), NEGATIVE),
    ((-HUGE, (2,), (HUGE,)), NEGATIVE),
    ((0, (-2, -3), (3, 1)), NEGATIVE),
    ((0, (-1,), (1,)), NEGATIVE),
    ((0, (2.0,), (1,)), NEGATIVE),
    ((True, (2,), (1,)), NEGATIVE),
    ((0, (2,), (1, 1)), NEGATIVE),
    ((0, "23", (3, 1)), NEGATIVE),
    ((0, (2,), (1,), {}), NEGATIVE),
    ((0, (7,), (1,)), LARGER),
    ((1, (6,), (1,)), LARGER),
    ((6, (), ()), LARGER),
    ((0, (2,), (6,)), LARGER),
    ((0, (2, 3), (4, 1)), LARGER),
    ((0, (2,), (2**64,)), LARGER),
    ((0, (3,), (2**63,)), LARGER),  # 2 ** 64 is 0 in 64 bits
    ((0, (2**32 + 1,), (2**32,)), LARGER),
    ((2**64, (1,), (1,)), LARGER),
    ((0, (HUGE, 4), (0, 1)), "repeats fewer numbers"),
    ((0, (2**40,), (0,)), "repeats fewer numbers"),
    ((0, (2,) * 99, (0,) * 99), "repeats fewer numbers"),
    ((0, (1,) * 99, (0,) * 99), "ValueError in pickle"),
    ((0, (0, 2**70), (1, 1)), "in pickle"),
]
OTHERS = [
    (view(0, (1,), (1,), Storage("1")), "KeyError in pickle"),
    (view(0, (1,), (1,), Storage("../data/0")), "KeyError in pickle"),
    (view(0, (1,), (1,), Storage("0", 7)), "storage 0 holds 6 of 7 numbers"),
    (view(0, (1,), (1,), Storage("0", 6, "LongStorage")), "storage 0 holds 3 of 6 numbers"),
    (view(0, (1,), (1,), Storage("0", HUGE)), f"storage 0 holds 6 of {HUGE} numbers"),
    (view(0, (1,), (1,), Storage("0", -1)), "not described by"),
    (view(0, (1,), (1,), Storage("0", 6.0)), "not described by"),
    (view(0, (1,), (1,), Storage(0)), "not described by"),
    (view(0, (1,), (1,), 5), NEGATIVE),
    (5, "not described by", b"Q"),
    (view(0, (6,), (1,), None, False, None, {"neg": True}), "a tensor with marks neg"),
    (Call("torch.FloatStorage", 5), "TypeError in pickle"),
    (Call("collections.OrderedDict", 5), "TypeError in pickle"),
    (Call("torch._utils._rebuild_tensor_v2"), "TypeError in pickle"),
    (Call("os.system", "true"), r"os\.system, which is not read"),
    (Name("a\x1b[2J.b"), r"a\\x1b\[2J\.b, which"),
    (Call("collections.OrderedDict", state=5), "the state of an object"),
    (view(0, (6,), (1,)), "the state of an object", b"}b"),
    (Name("torch.BFloat16Storage"), "the state of an object", b"(K\x03X\1\0\0\0<tb"),
    (Name("torch._utils._rebuild_tensor_v2"), "the state of an object", b"}X\1\0\0\0xNsb"),
    (b"", "IndexError in pickle"),
    (b"\xff", "KeyError in pickle"),
    (b"(", "in pickle"),
    (b"\x8e" + b"\xff" * 8, "in pickle"),  # as many bytes as 64 bits count
    (b"\x96" + b"\xff" * 7 + b"\x0f", "in pickle"),
]


@pytest.mark.parametrize(("arguments", "reason"), VIEWS)
def test_views_outside_of_the_storage_are_refused(arguments, reason, tmp_path):
    path = write(tmp_path / "x.pt", {"x": view(*arguments)})
    with pytest.raises(UserError, match=rf"x\.pt (is damaged \(|holds ).*{reason}"):
        read_pickled(path)


@pytest.mark.parametrize("case", OTHERS)
def test_crafted_pickles_are_refused_in_one_line(case, tmp_path):
    value, reason, *opcodes = case
    path = write(tmp_path / "x.pt", b"".join([dumps(value), *opcodes]))
    with pytest.raises(UserError, match=rf"x\.pt (is damaged \(|holds ).*{reason}") as refusal:
        read_pickled(path)
    assert str(refusal.value).isprintable()
    assert np.dtype(ml_dtypes.bfloat16).itemsize == 2


def test_a_large_index_of_a_memo_takes_no_memory(tmp_path):
    path = write(tmp_path / "x.pt", b"}r\xff\xff\xff\x7f")
    assert read_pickled(path) == {}


def test_nested_marks_are_not_printed(tmp_path):
    doubled = b"}X\1\0\0\0a" + b")" + b"2\x86" * 60 + b"s"  # a tuple with 2 ** 60 leaves
    call = dumps(view(0, (6,), (1,))).removesuffix(b"tR") + b"\x89N" + doubled + b"tR"
    with pytest.raises(UserError, match="a tensor with marks a, which is not read"):
        read_pickled(write(tmp_path / "x.pt", call))


def test_compressed_members_are_refused(tmp_path):
    options = {"compression": zipfile.ZIP_DEFLATED}
    path = write(tmp_path / "x.pt", {"x": view(0, (6,), (1,))}, bytes(10**6), **options)
    with pytest.raises(UserError, match="holds compressed parts, which is not read"):
        read_pickled(path)


def test_a_storage_of_many_tensors_is_read_once(tmp_path):
    tied = collections.OrderedDict(x=view(0, (6,), (1,)), y=view(3, (3,), (1,)))
    found = read_pickled(write(tmp_path / "x.pt", dict(tied)))
    assert isinstance(found, dict)
    assert np.shares_memory(found["x"], found["y"])
    assert not found["x"].flags.writeable
