"""Engines: how bytes go from rank to rank, over the communicator that a program has.

Ladon calls an engine's methods one at a time, and holds the bytearrays until poll() is true. Where a
call fails, messages may still be under way: an engine keeps what belongs to them alive.
"""

import datetime
import inspect
import sys
import threading
import time
from typing import Any, List, Sequence, Tuple

from ._errors import CommunicationError, InvalidArgumentError, UnsupportedError

Messages = Sequence[Tuple[int, bytearray]]

_DATA_TAG = 1
_FAILURE_TAG = 2
_REASON_BYTES = 2000
_PIECE = 1 << 30  # counts of MPI have 31 bits
# Requests and memory of messages that were never completed: they are the engine's for good.
_abandoned: List[Any] = []


class Engine:
    """What an engine offers; messages between two ranks arrive whole and in order.

    ``ladon.distributed.Communicator(MyEngine())`` takes any object with these attributes and methods.
    """

    rank: int
    size: int

    def start(self, sends: Messages, receives: Messages) -> None:
        """Begins one step: at most one message to and one from each rank.

        Parameters
        ----------
        sends, receives : sequence of (int, bytearray)
            The other rank, and the bytes or the memory for them.
        """
        raise NotImplementedError

    def poll(self) -> bool:
        """Whether the step has been completed. Raises where a message or another rank has failed."""
        raise NotImplementedError

    def pause(self) -> None:
        """Called between two polls that returned False."""
        time.sleep(2e-5)

    def silent_ranks(self) -> List[int]:
        """The ranks that the step still waits for."""
        raise NotImplementedError

    def abort(self, reason: str) -> None:
        """Tells all other ranks, without waiting for them: their poll() then raises with the reason."""
        raise NotImplementedError

    def split(self, group: List[int], color: int, key: int) -> "Engine":
        """An engine of some of the ranks. Every rank calls it, each with its own group.

        Parameters
        ----------
        group : list of int
            The ranks, in the order that they have in the new engine.
        color, key : int
            What Communicator.split() was called with.

        Returns
        -------
        Engine
        """
        raise NotImplementedError


class MpiEngine(Engine):
    """Over a communicator of mpi4py: a duplicate of it, which lives until MPI is finalised."""

    def __init__(self, comm: Any, own: bool = False) -> None:
        mpi = self._mpi = sys.modules["mpi4py.MPI"]
        if not mpi.Is_initialized() or mpi.Is_finalized():
            raise CommunicationError("Communicator: group: got an MPI that is not initialised or already finalised")
        if mpi.Query_thread() == mpi.THREAD_SINGLE:
            raise CommunicationError("Communicator: group: got MPI_THREAD_SINGLE, expected MPI_THREAD_FUNNELED or more")
        if mpi.Query_thread() == mpi.THREAD_FUNNELED and not mpi.Is_thread_main():
            raise CommunicationError("Communicator: group: got MPI_THREAD_FUNNELED on another thread than MPI's own")
        self._comm = comm if own else comm.Dup()
        self._comm.Set_errhandler(mpi.ERRORS_RETURN)
        self.rank = self._comm.Get_rank()
        self.size = self._comm.Get_size()
        self._requests: List[Any] = []
        self._pieces: List[Tuple[int, int]] = []  # peer and bytes of each request; receives come first
        self._receives = 0
        self._pauses = 0

    def _post(self, begin: Any, messages: Messages) -> None:
        for peer, buffer in messages:
            view = memoryview(buffer)
            for first in range(0, max(1, len(view)), _PIECE):
                piece = view[first:first + _PIECE]
                self._requests.append(begin([piece, self._mpi.BYTE], peer, _DATA_TAG))
                self._pieces.append((peer, len(piece)))

    def start(self, sends: Messages, receives: Messages) -> None:
        self._requests, self._pieces = [], []
        self._post(self._comm.Irecv, receives)
        self._receives = len(self._requests)
        self._post(self._comm.Isend, sends)

    def _check_failures(self) -> None:
        mpi = self._mpi
        status = mpi.Status()
        if self._comm.Iprobe(mpi.ANY_SOURCE, _FAILURE_TAG, status):
            reason = bytearray(status.Get_count(mpi.BYTE))
            self._comm.Recv([reason, mpi.BYTE], status.Get_source(), _FAILURE_TAG)
            raise CommunicationError(f"rank {status.Get_source()} failed: {reason.decode(errors='replace')}")

    def poll(self) -> bool:
        mpi = self._mpi
        self._check_failures()
        statuses = [mpi.Status() for _ in self._requests]
        if not mpi.Request.Testall(self._requests, statuses):
            return False
        self._requests = []
        self._check_failures()  # again, now that MPI has made progress: behind what came there may be one
        for (peer, expected), state in list(zip(self._pieces, statuses))[:self._receives]:
            if state.Get_count(mpi.BYTE) != expected:
                raise CommunicationError(f"got {state.Get_count(mpi.BYTE)} bytes from rank {peer}, expected {expected}")
        return True

    def pause(self) -> None:
        # Ranks on one machine share its CPUs: a wait must not take one for itself.
        self._pauses += 1
        time.sleep(0 if self._pauses % 16 else 5e-5)

    def silent_ranks(self) -> List[int]:
        return sorted({peer for request, (peer, _) in zip(self._requests, self._pieces) if not request.Get_status()})

    def abort(self, reason: str) -> None:
        _abandoned.append((self._requests, self._comm))
        text = bytearray(reason.encode()[:_REASON_BYTES])
        for other in range(self.size):
            if other != self.rank:
                _abandoned.append((text, self._comm.Isend([text, self._mpi.BYTE], other, _FAILURE_TAG)))

    def split(self, group: List[int], color: int, key: int) -> Engine:
        return MpiEngine(self._comm.Split(color, key), own=True)


class TorchEngine(Engine):
    """Over torch.distributed: a gloo group of the ranks of a process group of any backend.

    Gloo's requests cannot be polled, and a wait that ends early closes its connections: a thread waits for
    them, and another for the failure of any rank.
    """

    def __init__(self, ranks: List[int], deadline: float) -> None:
        import torch
        import torch.distributed

        self._torch = torch
        self._dist = torch.distributed
        if "use_local_synchronization" not in inspect.signature(self._dist.new_group).parameters:
            raise UnsupportedError(f"Communicator: group: got one of PyTorch {torch.__version__}, expected 2.1 or newer")
        self._ranks = ranks  # as the world counts them
        self._deadline = deadline
        # Longer than Ladon's own deadline, which says more.
        self._patience = datetime.timedelta(seconds=deadline + 30)
        self._group = self._dist.new_group(
            ranks, backend="gloo", timeout=self._patience, use_local_synchronization=True)
        self.rank = ranks.index(self._dist.get_rank())
        self.size = len(ranks)
        self._wake = threading.Condition()
        self._steps: List[List[Tuple[int, Any]]] = []  # for the thread that waits
        self._waiting: List[Tuple[int, Any]] = []  # the step's peers and requests that have not been completed
        self._failure = ""
        self._keep: Any = None
        threading.Thread(target=self._wait_for_steps, daemon=True, name="ladon-messages").start()
        if self.size > 1:
            threading.Thread(target=self._wait_for_failure, daemon=True, name="ladon-failures").start()

    def _tensor(self, buffer: bytearray) -> Any:
        # Gloo does not send empty messages.
        return self._torch.frombuffer(buffer or bytearray(1), dtype=self._torch.uint8)

    def _wait_for_steps(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._steps)
                step = self._steps.pop(0)
            for entry in step:
                try:
                    entry[1].wait(self._patience)
                except Exception as error:  # noqa: BLE001
                    with self._wake:
                        self._failure = self._failure or f"messages with rank {entry[0]} failed: {error}"
                        self._wake.notify_all()
                    return
                with self._wake:
                    self._waiting.remove(entry)
                    self._wake.notify_all()

    def _wait_for_failure(self) -> None:
        text = self._torch.zeros(_REASON_BYTES, dtype=self._torch.uint8)
        try:
            work = self._dist.irecv(text, group=self._group, tag=_FAILURE_TAG)
            work.wait(datetime.timedelta(days=3650))
        except Exception:  # noqa: BLE001
            return  # the group has ended
        with self._wake:
            self._failure = self._failure or bytes(text.tolist()).rstrip(b"\0").decode(errors="replace")
            self._wake.notify_all()

    def start(self, sends: Messages, receives: Messages) -> None:
        begun: List[Tuple[int, Any]] = []
        self._keep = []
        for begin, messages in ((self._dist.irecv, receives), (self._dist.isend, sends)):
            for peer, buffer in messages:
                tensor = self._tensor(buffer)
                self._keep.append(tensor)
                begun.append((peer, begin(tensor, self._ranks[peer], group=self._group, tag=_DATA_TAG)))
        with self._wake:
            self._waiting = list(begun)
            self._steps.append(begun)
            self._wake.notify_all()

    def poll(self) -> bool:
        with self._wake:
            if self._failure:
                raise CommunicationError(self._failure)
            return not self._waiting

    def pause(self) -> None:
        with self._wake:
            if self._waiting and not self._failure:
                self._wake.wait(0.005)

    def silent_ranks(self) -> List[int]:
        with self._wake:
            return sorted({peer for peer, _ in self._waiting})

    def abort(self, reason: str) -> None:
        _abandoned.append((self, self._keep))
        text = f"rank {self.rank} failed: {reason}".encode()[:_REASON_BYTES]
        tensor = self._tensor(bytearray(text.ljust(_REASON_BYTES, b"\0")))
        for other in range(self.size):
            if other != self.rank:
                _abandoned.append((tensor, self._dist.isend(tensor, self._ranks[other], group=self._group,
                                                            tag=_FAILURE_TAG)))

    def split(self, group: List[int], color: int, key: int) -> Engine:
        return TorchEngine([self._ranks[member] for member in group], self._deadline)


def engine_for(group: Any, deadline: float) -> Engine:
    """The engine that goes with a communicator of a program."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and isinstance(group, mpi.Comm):
        if group == mpi.COMM_NULL:
            raise InvalidArgumentError("Communicator: group: got MPI.COMM_NULL, expected a communicator")
        if group.Is_inter():
            raise InvalidArgumentError("Communicator: group: got an intercommunicator, expected an MPI.Intracomm")
        return MpiEngine(group)
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and isinstance(group, distributed.ProcessGroup):
        return TorchEngine(distributed.get_process_group_ranks(group), deadline)
    if all(hasattr(group, name) for name in ("rank", "size", "start", "poll", "pause", "silent_ranks", "abort", "split")):
        return group  # type: ignore[no-any-return]
    raise TypeError(f"Communicator: group: got {type(group).__name__}, expected an mpi4py.MPI.Comm, a "
                    "torch.distributed.ProcessGroup (such as torch.distributed.group.WORLD) or a "
                    "ladon.distributed.Engine")
