"""What the library throws, as Python's exceptions."""


class Error(Exception):
    """Every error of the library. The message names the operation and the argument."""


class InvalidArgumentError(Error, ValueError):
    """An argument breaks the contract."""


class UnsupportedError(Error, NotImplementedError):
    """Valid, but this build or this machine cannot do it."""


class OutOfMemoryError(Error, MemoryError):
    """An allocation failed, or a size would not fit the address space."""


class FileError(Error, OSError):
    """A file could not be read, written or trusted."""


class DeviceError(Error, RuntimeError):
    """A GPU failed; after a fault of a kernel every later call on it says so."""


class CommunicationError(Error, RuntimeError):
    """Ranks disagree, or one of them failed, stopped or sent nothing in time."""
