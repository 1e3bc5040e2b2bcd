"""openapi-python-client's client. The server's address is the first argument, the API key in API_KEY."""

from __future__ import annotations

import json
import os
import sys

from attention_client import AuthenticatedClient
from attention_client import models as m
from attention_client.api.attention import compute_attention

client = AuthenticatedClient(base_url=sys.argv[1], token=os.environ["API_KEY"])
request = m.AttentionRequest(
    query=[[8.7, 3.2, 4.1], [2.1, 9.9, 1.6]],
    key=[[9.1, 1.0, 2.1], [0.1, 7.5, 4.3], [1.3, 5.5, 8.2], [7.6, 2.4, 4.0], [8.5, 2.7, 2.7]],
    value=[
        [3.4, 1.3, 0.4, 9.8],
        [7.5, 3.9, 4.1, 0.2],
        [8.3, 2.8, 2.3, 0.1],
        [1.6, 8.4, 9.9, 3.4],
        [2.2, 9.4, 8.7, 1.1],
    ],
)
answer = compute_attention.sync(client=client, body=request)
assert isinstance(answer, m.AttentionResponse)
assert isinstance(answer.output, list)  # unless the request asks for base64
assert isinstance(answer.output[0][1], float)
print(json.dumps(answer.output))

request.key = request.value  # four features, the query has three
problem = compute_attention.sync(client=client, body=request)
assert isinstance(problem, m.Problem)
match problem.code:
    case m.ProblemCode.SHAPE_MISMATCH:
        print(problem.code, problem.errors[0].pointer)
    case _:
        raise ValueError(problem.detail)
