"""The attention function that transformers looks up by the name of the implementation."""

from __future__ import annotations

from contextvars import copy_context
from typing import Any, Final

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from attention_service.attention.gradients import PREFIX
from attention_service.transformers.call import (
    AttentionCall,
    UnsupportedCall,
    call_of,
    eager_of,
    make_request,
    without_unread,
)
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

    module: the layer, whose `num_key_value_groups`, `is_causal` and class name are read
    query, key, value: (b, h, l, d); key and value may have fewer heads
    attention_mask: booleans that hide where they are false, or numbers that are added; broadcast to (b, h, q, k)
    arguments: those of attention functions of transformers, like `scaling`, `softcap` and `s_aux`

    The output has exact gradients of query, key, value, an added mask, position bias, sinks and scaling.

    Errors: UnsupportedCall for what the service would compute differently.
    """
    read = without_unread(eager_of(module), module, arguments)
    call = call_of(module, query, key, value, attention_mask, read)
    _check(call)
    wants_weights = bool(arguments.get("output_attentions")) or _collects_weights()
    fields = make_request(call) | {"include": ["attention_weights"] if wants_weights else []}
    tensors = {name: value for name, value in fields.items() if isinstance(value, torch.Tensor)}
    others = {name: value for name, value in fields.items() if name not in tensors}
    output, weights = _Attention.apply(others, tuple(tensors), *tensors.values())
    return output.transpose(1, 2).contiguous(), weights


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
            f"{call.where}: dropout {call.argument('dropout')}; the service is exact. "
            "Set the dropout of attention in the model's configuration to 0, or call model.eval()"
        )
    if torch.is_grad_enabled() and getattr(call.argument("softcap"), "requires_grad", False):
        raise UnsupportedCall(f"{call.where}: softcap requires grad, and the service has no gradient of it")
    if torch.jit.is_tracing():
        raise UnsupportedCall(f"{call.where}: a traced model would keep the numbers of this one call")


class _Attention(torch.autograd.Function):  # type: ignore[misc]  # Any where torch is not installed
    """A request of a layer, and in the backward pass a second request for its gradients."""

    @staticmethod
    def forward(context: Any, others: dict[str, Any], names: tuple[str, ...], *tensors: Any) -> tuple[Any, Any]:
        """The output (b, h, q, d), and the weights (b, h, q, k) or None.

        names: of the fields that are tensors, the query first
        others: all other fields
        """
        found = compute(others | dict(zip(names, tensors, strict=True)))
        context.others, context.names = others, names
        context.save_for_backward(*tensors)
        context.set_materialize_grads(False)
        weights = found.get("attention_weights")
        return as_tensor(found["output"], tensors[0]), None if weights is None else as_tensor(weights, tensors[0])

    @staticmethod
    def backward(context: Any, grad_output: Any, grad_weights: Any) -> tuple[Any, ...]:
        """The gradient of each argument of `forward`; None where none is needed.

        Errors: UnsupportedCall for a loss that depends on the weights.
        """
        if grad_weights is not None:
            raise UnsupportedCall("a loss that depends on attention weights: the service has no gradient of them")
        needed = context.needs_input_grad[2:]
        if grad_output is None:  # the loss does not depend on the output
            return None, None, *(None for _ in needed)
        return None, None, *_Gradients.apply(context.others, context.names, needed, grad_output, *context.saved_tensors)


class _Gradients(torch.autograd.Function):  # type: ignore[misc]  # likewise
    """The gradients of a layer, which cannot be differentiated again.

    `once_differentiable` would let torch.autograd.grad take the second derivative for 0.
    """

    @staticmethod
    def forward(
        _context: Any, others: dict[str, Any], names: tuple[str, ...], needed: tuple[bool, ...], *tensors: Any
    ) -> tuple[Any, ...]:
        """The gradients of the tensors that need one; None for each other tensor.

        tensors: the gradient of the output (b, h, q, d), then the tensors of `names`
        """
        grad_output, *sources = tensors
        include = [PREFIX + name for name, is_needed in zip(names, needed, strict=True) if is_needed]
        request = others | dict(zip(names, sources, strict=True)) | {"grad_output": grad_output, "include": include}
        found = compute(request)
        arrays = [found.get(PREFIX + name) for name in names]
        return tuple(
            None if array is None else as_tensor(array, source) for array, source in zip(arrays, sources, strict=True)
        )

    @staticmethod
    def backward(_context: Any, *_gradients: Any) -> Any:
        """Errors: UnsupportedCall, always."""
        raise UnsupportedCall("the service has no second derivatives: differentiate attention once")
