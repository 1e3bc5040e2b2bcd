"""POST /attention."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from attention_service.routes.openapi import TENSOR_STATUSES, problems, tensor_answer, tensor_body
from attention_service.routes.tensors import add_tensor_route, respond
from attention_service.schemas.request import AttentionRequest
from attention_service.schemas.response import AttentionResponse


async def compute_attention(request: Request) -> Response:
    """Computes scaled dot-product attention exactly: softmax(scale · q kᵀ + bias) v. Each variant of it is a field.

    The response has the output, the attention weights and the intermediate results that `include` names.

    Large arrays are faster in npz or safetensors: a file with an array for each field, and the other fields as JSON
    text (in npz an array `request`, in safetensors the metadata `request`). In Python:

    ```python
    import json, numpy as np
    from safetensors.numpy import save_file

    arrays = {"input": np.eye(3, dtype=np.float32)}
    fields = json.dumps({"is_causal": True})
    np.savez("request.npz", **arrays, request=fields)
    save_file(arrays, "request.safetensors", {"request": fields})
    ```

    Then send one of them. The response has the format of the request, unless `Accept` names another:

    ```sh
    curl http://127.0.0.1:8000/attention --data-binary @request.npz \\
      -H 'Content-Type: application/x-npz' -o answer.npz
    curl http://127.0.0.1:8000/attention --data-binary @request.safetensors \\
      -H 'Content-Type: application/vnd.safetensors' -o answer.safetensors
    ```
    """
    return await respond(request, request.app.state.engine.attention_or_call)


def add_routes(app: FastAPI) -> None:
    """Add the operation to the application."""
    add_tensor_route(
        app,
        "/attention",
        compute_attention,
        tags=["attention"],
        operation_id="computeAttention",
        summary="Compute attention",
        response_model=AttentionResponse,
        response_description="The output, the results that `include` names, and metadata.",
        responses=problems(*TENSOR_STATUSES) | tensor_answer("answer.json"),
        openapi_extra=tensor_body(AttentionRequest, "examples.json"),
    )
