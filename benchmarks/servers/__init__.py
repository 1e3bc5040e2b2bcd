"""Servers to compare with, each an ASGI application for uvicorn."""
