"""Eager attention of Hugging Face transformers: of gpt-oss with sinks, of Gemma 2 with a softcap, else of Llama."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as of_gemma
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as of_gpt_oss
from transformers.models.llama.modeling_llama import eager_attention_forward as of_llama

from service.conformance.adapters.request import Request, adapter
from service.conformance.adapters.torch_functions import tensor
from service.conformance.target import Unsupported


@adapter("bias", "key_mask", "mask", "scale", "sinks", "softcap")
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
    arguments: dict[str, Any] = {"scaling": request.fields.get("scale", request.query.shape[-1] ** -0.5)}
    forward = of_llama
    if "sinks" in request:
        module.sinks = torch.nn.Parameter(tensor(request["sinks"]).to(query.dtype))
        forward = of_gpt_oss
    if "softcap" in request:
        if "sinks" in request:
            raise Unsupported("sinks or softcap only")
        forward, arguments["softcap"] = of_gemma, request["softcap"]
    with torch.no_grad():
        output, _ = forward(module, query, key, value, attention_mask=mask, **arguments)
    return request.restored(output.permute(0, 2, 1, 3))
