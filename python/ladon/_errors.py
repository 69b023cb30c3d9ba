"""What the library throws, as Python's exceptions."""

import errno
import os
from typing import Any


class Error(Exception):
    """Every error of the library. The message names the operation and the argument."""


class InvalidArgumentError(Error, ValueError):
    """An argument breaks the contract."""


class UnsupportedError(Error, NotImplementedError):
    """Valid, but this build or this machine cannot do it."""


class OutOfMemoryError(Error, MemoryError):
    """An allocation failed, or a size would not fit the address space."""


class FileError(Error, OSError):
    """A file could not be read, written or trusted.

    errno is that of the system call that failed, or None where the content is at fault. A missing
    file is a FileNotFoundError too, one without permission a PermissionError, a folder an
    IsADirectoryError.
    """

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""

    def __reduce__(self) -> Any:
        return file_error, (str(self), self.errno or 0)


class _MissingFileError(FileError, FileNotFoundError):
    pass


class _ForbiddenFileError(FileError, PermissionError):
    pass


class _FolderError(FileError, IsADirectoryError):
    pass


def file_error(message: str, number: int) -> FileError:
    """The error for a message, and the errno of what failed (0: none)."""
    kinds = {errno.ENOENT: _MissingFileError, errno.EACCES: _ForbiddenFileError,
             errno.EPERM: _ForbiddenFileError, errno.EISDIR: _FolderError}
    error = kinds.get(number, FileError)(message)
    if number:
        error.errno = number
        error.strerror = os.strerror(number)
    return error


# In a traceback they are what the documents call them.
for _kind in (_MissingFileError, _ForbiddenFileError, _FolderError):
    _kind.__name__ = _kind.__qualname__ = "FileError"


def as_part_of(operation: str, error: Error) -> Error:
    """The same error for a function that called the one which raised it: it names the function that the caller knows."""
    text = str(error)
    message = operation + text[text.find(": ") :]
    if isinstance(error, FileError):
        return file_error(message, error.errno or 0)
    return type(error)(message)


class DeviceError(Error, RuntimeError):
    """A GPU failed; after a fault of a kernel every later call on it says so."""


class CommunicationError(Error, RuntimeError):
    """Ranks disagree, or one of them failed, stopped or sent nothing in time."""


for _kind in (Error, InvalidArgumentError, UnsupportedError, OutOfMemoryError, FileError, _MissingFileError,
              _ForbiddenFileError, _FolderError, DeviceError, CommunicationError):
    _kind.__module__ = "ladon"
