"""Conversion of trained attention between MHA, GQA, MQA and MLA::

    calibration = ladon.convert.Calibration(layer.embed_dim)
    for x in inputs:
        calibration.add(x)
    converted, summary = ladon.convert.to_mla(layer, kv_rank=512, rope_dim=64, calibration=calibration)
    ladon.convert.refit_output(layer, converted, inputs)
    loss = ladon.convert.compare_layers(layer, converted, held_out)

docs/conversion.md says what is exact, what is lost, and how to judge it.
"""

import contextlib
import os
import re
from typing import TYPE_CHECKING

import numpy as np

from ._ladon import (
    Calibration,
    balance_channels,
    cache_elements,
    compare_layers,
    reduce_rank,
    refit_output,
    to_gqa,
    to_mha,
    to_mla,
    to_mqa,
)
from ._signatures import describe_functions

if not TYPE_CHECKING:
    describe_functions(globals())

__all__ = [
    "Calibration",
    "balance_channels",
    "cache_elements",
    "compare_layers",
    "record_inputs",
    "reduce_rank",
    "refit_output",
    "to_gqa",
    "to_mha",
    "to_mla",
    "to_mqa",
]

# "model.layers.3.self_attn", "transformer.h.0.attn", ...
_ATTENTION = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks)\.(\d+)\.(?:self_attn|attn|attention|self_attention)$")


@contextlib.contextmanager
def record_inputs(model, folder):
    """Records what the attention layers of a transformers model see.

    While the context lasts, the inputs of every attention module of the torch model are kept; at its
    end they are written to folder/layer_0.npy, layer_1.npy, ..., as [batch, seq, embed] in float32: what
    `ladon convert --calibrate` reads. All calls must have one length.

    Parameters
    ----------
    model : torch.nn.Module
        With attention modules named as in transformers, such as layers.0.self_attn.
    folder : path
        Is created if it does not exist.

    Examples
    --------
    ::

        with ladon.convert.record_inputs(model, "acts"), torch.no_grad():
            for ids in batches:
                model(ids)
    """
    recorded = {}
    hooks = []

    def keep(layer):
        def hook(_module, args, kwargs):
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            recorded.setdefault(layer, []).append(hidden.detach().float().cpu().numpy().copy())

        return hook

    for name, module in model.named_modules():
        found = _ATTENTION.search(name)
        if found:
            hooks.append(module.register_forward_pre_hook(keep(int(found.group(1))), with_kwargs=True))
    if not hooks:
        raise ValueError("record_inputs: model: got no attention modules, expected names such as layers.0.self_attn")
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    arrays = {}
    for layer, parts in recorded.items():
        lengths = sorted({part.shape[1] for part in parts})
        if len(lengths) != 1:
            raise ValueError(f"record_inputs: got sequences of {lengths} tokens, expected one length")
        arrays[layer] = np.concatenate(parts)
    os.makedirs(folder, exist_ok=True)
    for layer, array in arrays.items():
        np.save(os.path.join(folder, f"layer_{layer}.npy"), array)
