"""The application runs under every ASGI server that its users may choose."""
