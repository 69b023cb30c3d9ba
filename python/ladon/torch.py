"""Ladon for PyTorch: functions that autograd knows, and modules::

    import torch
    import ladon.torch

    out = ladon.torch.attention(q, k, v, causal=True)  # [batch, seq, heads, dim], with gradients
    out = ladon.torch.scaled_dot_product_attention(q, k, v, is_causal=True)  # as torch's own
    layer = ladon.torch.MultiHeadAttention(embed_dim=512, num_heads=8, num_kv_heads=2, rope={})
    layer = ladon.torch.MultiheadAttention(512, 8, batch_first=True)  # for torch.nn.MultiheadAttention

Tensors on the CPU or on an NVIDIA GPU, f64, f32, f16 or bf16; work on a GPU is enqueued on the current stream. What
Ladon needs with a last stride of 1 and has not is copied.
"""

import threading
from typing import Any, Dict, Optional, Tuple

import ladon as _ladon

try:
    import torch
    from torch import Tensor, nn
    from torch.autograd import Function
    from torch.autograd.function import once_differentiable
except ImportError as missing:
    raise ImportError(
        f"ladon.torch needs PyTorch, which cannot be imported here ({missing}): pip install torch"
    ) from missing

from ._torch_functions import (  # noqa: E402
    attention,
    autocast_dtype,
    rope,
    scaled_dot_product_attention,
)
from ._torch_layers import describe, layer_forward  # noqa: E402
from ._torch_operators import _dense, _packed, attention_weights, check_call, draw_seed  # noqa: E402

__all__ = [
    "LatentAttention",
    "Module",
    "MultiHeadAttention",
    "MultiheadAttention",
    "attention",
    "rope",
    "scaled_dot_product_attention",
]


class _LayerCall(Function):
    @staticmethod
    def forward(ctx, layer, lock, names, options, x, key, value, *parameters):  # type: ignore[no-untyped-def, override]
        ctx.lock, ctx.layer, ctx.names = lock, layer, names
        out, ctx.saved = layer.forward_training(_dense(x), _dense(key), _dense(value), **options)
        # Backward reads the weights; torch then sees whether they were changed in between.
        ctx.save_for_backward(*parameters)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):  # type: ignore[no-untyped-def, override]
        parameters = ctx.saved_tensors
        with ctx.lock:
            ctx.layer.zero_grad()
            dx, dkey, dvalue = ctx.layer.backward(_dense(dout), ctx.saved)
            named = ctx.layer.gradients("torch")
            gradients = [named[n].to(p.dtype, copy=True) for n, p in zip(ctx.names, parameters)]
        return (None, None, None, None, dx, dkey, dvalue, *gradients)


class Module(nn.Module):
    """A Ladon layer as a torch module.

    Its parameters are the layer's own memory: optimisers and load_state_dict() write straight into it. Where
    torch puts other memory in a parameter's place (functional_call, swapped parameters), calls work on a copy
    of the layer with these values. to("cuda"), half(), double(), to(torch.bfloat16) and the like move and convert the
    layer. Under autocast a call runs in autocast's dtype, on a copy of the layer in it. Modules pickle and deep-copy.
    """

    def __init__(self, layer: _ladon.AttentionLayer) -> None:
        super().__init__()
        self.layer = layer
        self._gradient_lock = threading.Lock()
        for name, value in layer.parameters("torch").items():
            # torch does not allow dots in the names of parameters: q_proj.weight is a module's.
            owner: nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, nn.Module())
                owner = getattr(owner, part)
            owner.register_parameter(last, nn.Parameter(value))
        self._description = describe(self)
        self._drops = layer.options["dropout"] > 0

    def _apply(self, fn: Any, recurse: bool = True) -> "Module":
        """Where torch moves or converts the parameters, so does the layer, and its memory stays theirs."""
        before = self._place()
        super()._apply(fn, recurse)
        parameters = dict(self.named_parameters())
        if self._place() == before or self._place()[0].type not in ("cpu", "cuda"):
            return self
        self.layer = self._layer_with(parameters, self._place()[1])
        own = self.layer.parameters("torch")
        for name, parameter in parameters.items():
            parameter.data = own[name]
        return self

    def _place(self) -> Tuple[torch.device, torch.dtype]:
        first = next(self.parameters())
        return first.device, first.dtype

    def _layer_now(self) -> _ladon.AttentionLayer:
        """The layer with the values that the parameters have now."""
        parameters = dict(self.named_parameters())
        own = self.layer.parameters("torch")
        if all(p.data_ptr() == own[n].data_ptr() for n, p in parameters.items()):
            return self.layer
        return self._layer_with(parameters, self._place()[1])

    def _layer_with(self, values: Dict[str, Tensor], dtype: torch.dtype) -> _ladon.AttentionLayer:
        """A copy of the layer with these values, where they are, in this dtype."""
        device = str(next(iter(values.values())).device)
        if dtype == next(iter(self.layer.parameters("torch").values())).dtype:
            layer = self.layer.copy() if device == self.layer.device else self.layer.to(device)
        else:
            layer = type(self.layer)(**{**self.layer.options, "dtype": dtype, "device": device})
        # set_parameter() takes values from the layer's device, or from the CPU.
        for name, value in values.items():
            layer.set_parameter(name, value.detach())
        layer.train(self.training)
        return layer

    def forward(
        self, x: Tensor, key: Optional[Tensor] = None, value: Optional[Tensor] = None, **options: Any
    ) -> Any:
        """The layer's output for x. With a cache, or without gradients, nothing is kept for backward.

        Parameters
        ----------
        x, key, value : Tensor
            As AttentionLayer.forward() takes them.
        options
            All others of AttentionLayer.forward().

        Returns
        -------
        Tensor
            Of the shape of x, or (Tensor, weights) with return_weights.
        """
        if torch.compiler.is_compiling():
            return self._forward_as_operator(x, key, value, options)
        self.layer.train(self.training)
        named = dict(self.named_parameters())
        wanted = autocast_dtype(x)
        if wanted is not None and options.get("cache") is None:
            # As torch's own modules: inputs and weights in autocast's dtype, gradients in their own.
            named = {name: parameter.to(wanted) for name, parameter in named.items()}
            x, key, value = (None if t is None else t.to(wanted) for t in (x, key, value))
            layer = self._layer_with(named, wanted)
        else:
            layer = self._layer_now()
        parameters = list(named.values())
        tensors = [x, key, value, *parameters]
        needs = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
        plain = options.get("cache") is not None or options.get("return_weights")
        drops = self.training and self.layer.options["dropout"] > 0 and options.get("cache") is None
        if drops:
            options.setdefault("dropout_seed", int(draw_seed()))
        check_call(type(self).__name__, *tensors, out=options.get("out") if needs and not plain else None)
        if plain or not needs:
            return layer.forward(_dense(x), _dense(key), _dense(value), **options)
        return _LayerCall.apply(layer, self._gradient_lock, list(named), options, x, key, value, *parameters)

    def _forward_as_operator(
        self, x: Tensor, key: Optional[Tensor], value: Optional[Tensor], options: Dict[str, Any]
    ) -> Tensor:
        """The same as one node of a graph, for torch.compile and torch.export."""
        for name in ("cache", "return_weights", "out", "context"):
            if options.get(name) is not None and options[name] is not False:
                raise ValueError(f"ladon.torch: {name}: not available under torch.compile and torch.export")
        parameters = list(self.parameters())
        wanted = autocast_dtype(x)
        if wanted is not None:
            parameters = [parameter.to(wanted) for parameter in parameters]
            x, key, value = (None if t is None else t.to(wanted) for t in (x, key, value))
        seed = None
        if self.training and self._drops and "dropout_seed" not in options:
            seed = draw_seed()
        spec, arrays = _packed(options)
        return layer_forward(x, key, value, parameters, arrays, seed, self._description, spec, self.training)

    def __getstate__(self) -> Dict[str, Any]:
        """For pickle and copy: the layer's weights are those of the parameters."""
        state = super().__getstate__()
        state["layer"] = type(self.layer), {**self.layer.options, "device": "cpu"}
        for name in ("_gradient_lock", "_description"):
            del state[name]
        return state

    def __setstate__(self, state: Dict[str, Any]) -> None:
        super().__setstate__(state)
        parameters = dict(self.named_parameters())
        device, dtype = self._place()
        kind, options = state["layer"]
        self.layer = kind(**{**options, "dtype": dtype, "device": str(device)})
        own = self.layer.parameters("torch")
        for name, parameter in parameters.items():
            self.layer.set_parameter(name, parameter.detach())
            parameter.data = own[name]
        self.layer.train(self.training)
        self._gradient_lock = threading.Lock()
        self._description = describe(self)

    def extra_repr(self) -> str:
        return repr(self.layer)


class MultiHeadAttention(Module):
    """ladon.MultiHeadAttention as a torch module; takes the same options."""

    def __init__(self, **options: Any) -> None:
        super().__init__(_ladon.MultiHeadAttention(**options))


class LatentAttention(Module):
    """ladon.LatentAttention (MLA) as a torch module; takes the same options."""

    def __init__(self, **options: Any) -> None:
        super().__init__(_ladon.LatentAttention(**options))


class MultiheadAttention(nn.MultiheadAttention):
    """torch.nn.MultiheadAttention with Ladon's attention inside: same arguments, same state_dict.

    Without add_bias_kv, add_zero_attn and nested tensors. A row that may see nothing gives the output's bias,
    where torch gives NaN.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.bias_k is not None or self.add_zero_attn:
            raise ValueError("MultiheadAttention: add_bias_kv and add_zero_attn are not supported")

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> Tuple[Tensor, ...]:
        if self._qkv_same_embed_dim:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        inputs = (query, key, value)
        projected = (nn.functional.linear(x, w, b) for x, w, b in zip(inputs, weights, biases))
        return tuple(p.reshape(*p.shape[:2], self.num_heads, -1) for p in projected)

    def _masks(self, padding: Optional[Tensor], mask: Optional[Tensor], batch: int) -> Dict[str, Tensor]:
        """torch's masks hide where they are true, or are added; Ladon's show where they are true."""
        options: Dict[str, Tensor] = {}
        if mask is not None and mask.dim() == 3:
            mask = mask.reshape(batch, self.num_heads, *mask.shape[1:])
        if padding is not None:
            padding = padding.reshape(batch, 1, 1, -1)
        for part in (mask, padding):
            if part is None:
                continue
            if part.dtype == torch.bool:
                shown = part.logical_not()
                options["mask"] = shown & options["mask"] if "mask" in options else shown
            else:
                options["bias"] = part + options["bias"] if "bias" in options else part
        return {name: _dense(part) if name == "mask" else part for name, part in options.items()}

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Optional[Tensor] = None,
        need_weights: bool = True,
        attn_mask: Optional[Tensor] = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> Tuple[Tensor, Optional[Tensor]]:
        """As torch.nn.MultiheadAttention.forward().

        Parameters
        ----------
        query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            Those of torch.nn.MultiheadAttention.forward().

        Returns
        -------
        out : Tensor
        weights : Tensor or None
            With need_weights; they carry no gradient.
        """
        batched = query.dim() == 3
        if not batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q, k, v = self._project(query, key, value)
        options: Dict[str, Any] = dict(self._masks(key_padding_mask, attn_mask, q.shape[0]))
        options.update(causal=is_causal, alignment="top_left")
        if self.training and self.dropout > 0:
            options.update(dropout=self.dropout, dropout_seed=draw_seed())
        out = self.out_proj(attention(q, k, v, **options).flatten(2))
        weights = None
        if need_weights:
            bias = options.pop("bias", None)
            stage = "dropped" if "dropout" in options else "probability"
            spec, arrays = _packed({"stage": stage, **options})
            weights = attention_weights(*(None if t is None else t.detach() for t in (q, k, bias)), arrays, spec)
            weights = weights.mean(dim=1) if average_attn_weights else weights
        if not batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return (out if self.batch_first else out.transpose(0, 1)), weights
