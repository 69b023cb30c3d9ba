"""The functions of ladon.torch: what autograd, torch.compile and torch.export know."""

from typing import Any, Dict, Optional

import torch
from torch import Tensor

from ._torch_operators import _attention, _dense, _packed, check_call, draw_seed, rotate


def autocast_dtype(tensor: Tensor) -> Optional[torch.dtype]:
    """The dtype that autocast wants here; None where it is off or the tensor is double."""
    kind = tensor.device.type
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return None
    if not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(kind)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: Optional[Tensor] = None,
    sinks: Optional[Tensor] = None,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """ladon.attention() with gradients for q, k, v, bias, sinks and, where it is returned, lse.

    Gradients of gradients are not available.

    Parameters
    ----------
    q : Tensor [batch, query_len, num_heads, head_dim]
    k : Tensor [batch, kv_len, num_kv_heads, head_dim]
    v : Tensor [batch, kv_len, num_kv_heads, value_dim]
    bias, sinks : Tensor, optional
        As ladon.attention() takes them.
    return_lse : bool
        Return the log-sum-exp too.
    options
        All others of ladon.attention() but `out`. Dropout is drawn by dropout_seed alone, an integer or a tensor: give another one
        in each step.

    Returns
    -------
    out : Tensor [batch, query_len, num_heads, value_dim]
    lse : Tensor [batch, num_heads, query_len]
        With return_lse.
    """
    check_call("attention", q, k, v, bias, sinks, out=options.pop("out", None))
    wanted = autocast_dtype(q)  # as torch's own attention, which autocast runs in its lower precision
    if wanted is not None:
        q, k, v = q.to(wanted), k.to(wanted), v.to(wanted)
    spec, arrays = _packed(options)
    out, lse = _attention(q, k, v, bias, sinks, arrays, spec)
    return (out, lse) if return_lse else out


def rope(x: Tensor, **options: Any) -> Tensor:
    """ladon.rope() with a gradient for x.

    Parameters
    ----------
    x : Tensor [batch, seq, heads, head_dim]
    options
        Those of ladon.rope() but `out`.

    Returns
    -------
    Tensor
        Of the shape of x.
    """
    check_call("rope", x, out=options.pop("out", None))
    spec, arrays = _packed(options, "rope")
    return rotate(x, arrays, spec, False)


def _mask_options(mask: Optional[Tensor]) -> Dict[str, Any]:
    if mask is None:
        return {}
    return {"mask": _dense(mask)} if mask.dtype == torch.bool else {"bias": mask}


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Optional[Tensor] = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention() with Ladon's attention inside.

    A row that may see nothing gives 0.

    Parameters
    ----------
    query : Tensor [..., num_heads, query_len, head_dim]
    key : Tensor [..., num_kv_heads, kv_len, head_dim]
    value : Tensor [..., num_kv_heads, kv_len, value_dim]
    attn_mask : Tensor, optional
        Bool, true where a query may look, or added to the scores.
    dropout_p : float
        Probability with which a weight is dropped, drawn by torch's generator.
    is_causal : bool
        From the top left, as in PyTorch.
    scale : float, optional
        Factor of the scores; 1 / sqrt(head_dim) unless given.
    enable_gqa : bool
        Allow fewer heads in key and value.

    Returns
    -------
    Tensor [..., num_heads, query_len, value_dim]
    """
    if query.dim() < 3:
        raise ValueError("scaled_dot_product_attention: query: expected at least 3 dimensions")
    if not enable_gqa and query.shape[-3] != key.shape[-3]:
        raise ValueError("scaled_dot_product_attention: key: other heads than query's need enable_gqa=True")
    leading = query.shape[:-3]

    def ours(tensor: Tensor) -> Tensor:
        return tensor.expand(*leading, *tensor.shape[-3:]).reshape(-1, *tensor.shape[-3:]).transpose(1, 2)

    if attn_mask is not None and attn_mask.dim() > 3 and attn_mask.dim() != 4:
        attn_mask = attn_mask.expand(*leading, *attn_mask.shape[-3:]).reshape(-1, *attn_mask.shape[-3:])
    options = _mask_options(attn_mask)
    if dropout_p > 0:
        options.update(dropout=dropout_p, dropout_seed=draw_seed())
    out = attention(
        ours(query), ours(key), ours(value), causal=is_causal, alignment="top_left", scale=scale, **options
    )
    return out.transpose(1, 2).reshape(*query.shape[:-1], value.shape[-1])
