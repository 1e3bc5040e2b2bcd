"""POST /attention."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from service.http.request_id import request_id
from service.routes.documented import PROBLEMS, tensor_answer, tensor_body
from service.routes.tensors import TensorRequest, TensorRoute
from service.schemas.request import AttentionRequest
from service.schemas.response import AttentionResponse, answer

router = APIRouter(tags=["attention"], route_class=TensorRoute)


@router.post(
    "/attention",
    operation_id="computeAttention",
    summary="Compute attention",
    response_model=AttentionResponse,
    response_description="The output, what was asked for beside it, and what was done.",
    responses=PROBLEMS | tensor_answer(),
    openapi_extra=tensor_body(),
)
async def compute_attention(body: AttentionRequest, request: TensorRequest) -> dict[str, Any]:
    """Scaled dot-product attention, exactly: softmax(scale · q kᵀ + bias) v, with every variant as a field.

    The answer holds the output, the attention weights and any stage on the way that `include` names.
    """
    result = await request.engine.attend(request.job, request.call)
    return answer(request.job.spec, result, request_id(request.scope))
