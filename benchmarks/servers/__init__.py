"""ASGI applications to compare with, run by uvicorn."""
