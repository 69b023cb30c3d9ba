"""Attention over several processes, or several threads of one.

Over the communicator that a program has, mpi4py's or torch.distributed's::

    from mpi4py import MPI
    import ladon.distributed

    ranks = ladon.distributed.Communicator(MPI.COMM_WORLD)
    layer = ladon.distributed.TensorParallelAttention(ranks, embed_dim=512, num_heads=8, causal=True)
    layer.set_whole_parameters(whole)  # each rank takes its slices
    y = layer(x)  # x and y are whole on every rank

All ranks make the same calls in the same order. What disagrees, and a rank that fails or stops, is a
CommunicationError on every rank, within the deadline. docs/parallel.md says who owns what, how many bytes
are sent, and which results have the bits of one process.
"""

from typing import TYPE_CHECKING, Any, Sequence, Tuple

import numpy as np

from ._engines import Engine
from ._ladon import (
    Communicator,
    SpreadKvCache,
    TensorParallelAttention,
    TensorParallelLatentAttention,
    TensorParallelLayer,
    context_parallel_attention,
    context_parallel_attention_backward,
    context_parallel_backward,
    context_parallel_forward,
    context_parallel_forward_training,
    load_tensor_parallel_attention,
    load_training,
    make_thread_communicators,
    plan_context,
    save_training,
    write_tensor_parallel_attention,
)
from ._signatures import describe_functions
from ._types import ContextPlan

if not TYPE_CHECKING:
    describe_functions(globals())

__all__ = [
    "Communicator",
    "ContextPlan",
    "Engine",
    "SpreadKvCache",
    "TensorParallelAttention",
    "TensorParallelLatentAttention",
    "TensorParallelLayer",
    "context_parallel_attention",
    "context_parallel_attention_backward",
    "context_parallel_backward",
    "context_parallel_forward",
    "context_parallel_forward_training",
    "join_tokens",
    "load_tensor_parallel_attention",
    "load_training",
    "make_thread_communicators",
    "plan_context",
    "save_training",
    "take_tokens",
    "write_tensor_parallel_attention",
]


def take_tokens(array: Any, ranges: Sequence[Tuple[int, int]], axis: int = 1) -> Any:
    """A rank's tokens of a whole array: ``take_tokens(q, plan.queries[rank])``.

    Parameters
    ----------
    array : array
        Of all tokens.
    ranges : sequence of (int, int)
        Of the rank, from a ContextPlan.
    axis : int
        That of the tokens.

    Returns
    -------
    array
    """
    index = np.concatenate([np.arange(begin, end) for begin, end in ranges] or [np.arange(0)])
    return array[(slice(None),) * axis + (index,)]


def join_tokens(parts: Sequence[Any], ranges: Sequence[Sequence[Tuple[int, int]]], axis: int = 1) -> Any:
    """The whole array from all ranks' tokens: the opposite of take_tokens().

    Parameters
    ----------
    parts : sequence of array
        One for each rank.
    ranges : sequence of sequence of (int, int)
        Of all ranks, such as plan.queries.
    axis : int
        That of the tokens.

    Returns
    -------
    numpy.ndarray
    """
    order = np.concatenate([np.arange(begin, end) for own in ranges for begin, end in own])
    return np.take(np.concatenate(parts, axis=axis), np.argsort(order), axis=axis)
