"""The application under every ASGI server that its users may run it under."""
