"""What uvicorn lacks: time and size limits for request heads, an end to stalled responses, joined writes."""
