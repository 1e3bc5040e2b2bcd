"""openapi-generator's client for urllib3. The server's address is the first argument, the API key in API_KEY."""

from __future__ import annotations

import json
import os
import sys

from attention_urllib3 import ApiClient, ApiException, AttentionApi, Configuration
from attention_urllib3.models import AttentionRequest, Problem, ProblemCode

configuration = Configuration(host=sys.argv[1], access_token=os.environ["API_KEY"])
request = AttentionRequest(
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
with ApiClient(configuration) as client:
    api = AttentionApi(client)
    answer = api.compute_attention_with_http_info(request)
    assert answer.headers is not None
    assert answer.headers["x-request-id"] == answer.data.metadata.request_id
    assert isinstance(answer.data.output[0][1], float)  # nested lists, unless the request asks for base64
    print(json.dumps(answer.data.output))

    request.key = request.value  # four features, the query has three
    try:
        api.compute_attention(request)
    except ApiException as error:
        problem = Problem.from_json(error.body)
        match problem.code:
            case ProblemCode.SHAPE_MISMATCH:
                print(problem.code.value, problem.errors[0].pointer)
            case _:
                raise
