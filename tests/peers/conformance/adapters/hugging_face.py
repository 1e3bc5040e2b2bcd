"""Eager attention of Hugging Face transformers: of the model that has the option, else of Llama.

With sinks that of gpt-oss, with sinks of queries that of Inkling 2, for weights without sinks that of Granite SWA, and
with a softcap that of Gemma 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as of_gemma
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as of_gpt_oss
from transformers.models.granite_swa.modeling_granite_swa import eager_attention_forward as of_granite
from transformers.models.inkling2.modeling_inkling2 import eager_attention_forward as of_inkling
from transformers.models.llama.modeling_llama import eager_attention_forward as of_llama

from attention_service.conformance.target import Unsupported
from tests.peers.conformance.adapters.request import Request, adapter
from tests.peers.conformance.adapters.torch_functions import tensor


@adapter("bias", "include", "key_mask", "mask", "scale", "sinks", "softcap")
def eager(request: Request) -> Any:
    """The output of the model's function. Masks hold the least number of the type where a key is hidden."""
    query, key, value = tensor(request.query), tensor(request.key), tensor(request.value)
    module = torch.nn.Module()
    module.num_key_value_groups = request.groups
    module.training = False
    mask = None
    if (seen := request.seen()) is not None:
        least = torch.finfo(query.dtype).min
        mask = torch.where(tensor(seen), 0.0, least).to(query.dtype)
    if "bias" in request:
        if mask is not None:
            raise Unsupported("one attention_mask only")
        mask = tensor(request["bias"]).to(query.dtype)
    arguments: dict[str, Any] = {"scaling": request.query.shape[-1] ** -0.5 if request.scale is None else request.scale}
    forward, more = _forward(request, module, query.dtype)
    with torch.no_grad():
        output, weights = forward(module, query, key, value, attention_mask=mask, **arguments, **more)
    found = {"output": request.restored(output.permute(0, 2, 1, 3))}
    if forward is of_granite:
        found["weights_without_sinks"] = request.restored_rows(weights)
    return found


def _forward(
    request: Request, module: torch.nn.Module, dtype: torch.dtype
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function that has the options of a request, and its arguments for them."""
    if {"sinks", "softcap"} <= request.fields.keys():
        raise Unsupported("sinks or softcap only")
    if "softcap" in request:
        return of_gemma, {"softcap": request["softcap"]}
    if "sinks" not in request:
        return of_llama, {}
    sinks = tensor(request["sinks"]).to(dtype)
    if sinks.ndim > 1:
        if "include" in request:
            raise Unsupported("weights without sinks of heads only")
        return of_inkling, {"sinks": sinks[..., None]}
    module.sinks = torch.nn.Parameter(sinks)
    return of_granite if "include" in request else of_gpt_oss, {}
