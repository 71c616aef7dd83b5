"""Streams of bytes: reads are reported, and decompression has a limit."""

import gzip
import io
import os
from collections.abc import Callable, Iterator

import zstandard

from heinsen_jax.errors import UserError

CHUNK_BYTES = 1 << 20

MAX_EXPANSION = 200
"""Limit of the decompressed size of a file, as a multiple of the stored size. Compressed text
expands 2 to 20 times, a decompression bomb 1,000 times and more."""
MAX_EXPANSION_VARIABLE = "HEINSEN_JAX_MAX_EXPANSION"
"""Environment variable that replaces `MAX_EXPANSION`."""
UNLIMITED_BYTES = 64 << 20
"""Decompressed size, in bytes, below which the limit does not apply."""

# zstandard returns all output of its input in one call, up to 128 KiB for every 4 bytes.
_ZSTANDARD_INPUT_BYTES = 1 << 10


def reporting(
    file: io.IOBase, on_read: Callable[[memoryview], None], buffer_bytes: int = CHUNK_BYTES
) -> io.BufferedReader:
    """Return a reader of a file that calls a function with each block that is read."""
    return io.BufferedReader(_ReportingFile(file, on_read), buffer_bytes)


class _ReportingFile(io.RawIOBase):
    def __init__(self, file: io.IOBase, on_read: Callable[[memoryview], None]) -> None:
        self._file, self._on_read = file, on_read

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._file.seekable()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def readinto(self, buffer) -> int:
        count = self._file.readinto(buffer)  # type: ignore[attr-defined]
        self._on_read(memoryview(buffer)[:count])
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


class Expansion:
    """The decompressed size of a file, which is limited.

    Args:
      name: name of the file, for messages.
      stored: returns the number of stored bytes that have been expanded.
    """

    def __init__(self, name: str, stored: Callable[[], int]) -> None:
        self._name, self._stored, self._factor = name, stored, _max_expansion()
        self._size, self._limit = 0, UNLIMITED_BYTES

    def add(self, count: int) -> None:
        """Count further bytes.

        Raises:
          UserError: the sum is above the limit.
        """
        self._size += count
        if self._size <= self._limit:
            return
        self._limit = max(UNLIMITED_BYTES, self._stored() * self._factor)
        if self._size > self._limit:
            raise UserError(
                f"{self._name} expands to more than {self._factor} times its size, as a "
                "decompression bomb does; if it is text, decompress it by hand, or set the "
                f"environment variable {MAX_EXPANSION_VARIABLE} to a larger factor"
            )

    def limit(self, file: io.IOBase) -> io.BufferedReader:
        """Return a reader of a file with expanded content."""
        return reporting(file, lambda block: self.add(len(block)))


def _max_expansion() -> int:
    value = os.environ.get(MAX_EXPANSION_VARIABLE, str(MAX_EXPANSION))
    if not value.isdecimal() or int(value) < 1:
        raise UserError(
            f"{MAX_EXPANSION_VARIABLE}={value}: not a positive integer; give one, such as 1000"
        )
    return int(value)


def decompressed(file: io.BufferedReader, compression: str, name: str) -> io.IOBase:
    """The content of a file with the compression `gz` or `zst`, of any size."""
    if compression == "gz":
        return gzip.GzipFile(fileobj=file)
    return _ChunkFile(_zstandard_chunks(file, name))


class _ChunkFile(io.RawIOBase):
    """A file with the content of chunks."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._rest = chunks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = memoryview(chunk)
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


def _zstandard_chunks(file: io.BufferedReader, name: str) -> Iterator[bytes]:
    """Decompress frame by frame. (A stream reader would not report a truncated frame.)"""
    decompressor = zstandard.ZstdDecompressor(max_window_size=2**31)
    frame = None
    try:
        while chunk := file.read(_ZSTANDARD_INPUT_BYTES):
            while chunk:
                frame = frame or decompressor.decompressobj()
                yield frame.decompress(chunk)
                chunk = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
    except zstandard.ZstdError as error:
        raise UserError(f"{name} is damaged ({error}); get the file again") from error
    if frame is not None:
        raise UserError(f"{name} is truncated: its last frame has no end; get the file again")
