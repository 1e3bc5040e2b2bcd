"""ASGI: middleware, request bodies, content negotiation, problem details, streaming."""
