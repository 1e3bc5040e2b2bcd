"""The attention function that transformers looks up by the name of the implementation."""

from __future__ import annotations

from contextvars import copy_context
from typing import Any, Final

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from attention_service.transformers.call import AttentionCall, UnsupportedCall, call_of, make_request
from attention_service.transformers.engine import as_tensor, compute

NAME: Final = "attention-service"
# The context variable in which transformers collects what a model is to return beside its output.
COLLECTOR: Final = "output_collector"


def register() -> None:
    """Let `attn_implementation="attention-service"` stand for `attention`.

    The masks are those of eager attention, as models calculate with them: a boolean mask would go wrong where numbers
    are appended to it (DeepSeek V4). Unlike those for torch's function, they are never left out where they are causal.
    """
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, eager_mask)


@torch.compiler.disable  # a compiled model calls it as it is
def attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **arguments: Any
) -> tuple[Any, Any]:
    """The output (b, q, h, d) of an attention layer, and its weights (b, h, q, k) if the model returns them, else None.

    Errors: UnsupportedCall for what the service would compute differently.
    """
    call = call_of(module, query, key, value, attention_mask, arguments)
    _check(call)
    wants_weights = bool(arguments.get("output_attentions")) or _collects_weights()
    fields = make_request(call) | {"include": ["attention_weights"] if wants_weights else []}
    found = compute(fields)
    output = as_tensor(found["output"], query).transpose(1, 2).contiguous()
    if torch.is_grad_enabled() and any(source.requires_grad for source in (query, key, value)):
        output = _WithoutGradient.apply(output, query, key, value)
    return output, as_tensor(found["attention_weights"], query) if wants_weights else None


def _collects_weights() -> bool:
    """True if a model runs with `output_attentions=True`.

    Modules of many models take the argument without handing it to their attention function, as eager attention always
    returns weights. transformers has no public function that says what it collects, but Python lists the variables of
    a context. Without that variable the argument alone counts.
    """
    collected = next((value for variable, value in copy_context().items() if variable.name == COLLECTOR), None)
    return any(key.endswith("attentions") for key in collected or ())


def _check(call: AttentionCall) -> None:
    """Refuse what only the forward pass of a model that is in use can mean."""
    if (call.argument("dropout") or 0) > 0:
        raise UnsupportedCall(
            f"{call.where}: dropout {call.argument('dropout')}; the service is exact. Call model.eval()"
        )
    if torch.jit.is_tracing():
        raise UnsupportedCall(f"{call.where}: a traced model would keep the numbers of this one call")


class _WithoutGradient(torch.autograd.Function):  # type: ignore[misc]  # Any where torch is not installed
    """The output as it is; training would need its gradient, which is an error."""

    @staticmethod
    def forward(_context: Any, output: Any, *_sources: Any) -> Any:
        """The output."""
        return output.view_as(output)

    @staticmethod
    def backward(_context: Any, *_gradients: Any) -> Any:
        """Errors: UnsupportedCall, always."""
        raise UnsupportedCall(f'attn_implementation="{NAME}" computes no gradients; train with another one')
