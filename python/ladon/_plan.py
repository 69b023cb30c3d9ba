"""plan(): what a model's caches need, before anything is bought."""

import os
from typing import Any, Dict, List, Optional, Union

from ._errors import Error, as_part_of
from ._ladon import compare_cache_memory, describe_model
from ._types import DTypeLike

_SIZES = ("num_layers", "num_heads", "num_kv_heads", "head_dim")


def plan(
    model: Optional[Union[str, "os.PathLike[str]"]] = None,
    *,
    length: int,
    batch: int = 1,
    dtype: Optional[DTypeLike] = None,
    **sizes: Any,
) -> List[Dict[str, Any]]:
    """Cache memory of MHA, GQA, MQA and MLA for one model, side by side.

    Parameters
    ----------
    model : path, optional
        A folder with a config.json.
    length : int
        Tokens of each sequence.
    batch : int
        Sequences.
    dtype : optional
        Of the cache; the model's own where it says one, else bf16.
    **sizes
        Without a model: num_heads, head_dim, num_layers, num_kv_heads (GQA), kv_rank and rope_dim (MLA).

    Returns
    -------
    list of dict
        For each kind its kind, elements, bytes and reduction: the share that it saves against MHA.
    """
    try:
        if model is not None:
            description = describe_model(model)
            dtype = dtype or description["dtype"]
            latent = "kv_rank" in description["layers"][0]
            for name in ("num_layers", "num_heads", "head_dim") if latent else _SIZES:
                sizes.setdefault(name, description[name])
            if latent:
                for name in ("kv_rank", "rope_dim", "value_dim"):
                    sizes.setdefault(name, description["layers"][0][name])
        return compare_cache_memory(length=length, batch=batch, dtype=dtype or "bf16", **sizes)
    except Error as error:
        raise as_part_of("plan", error) from None
