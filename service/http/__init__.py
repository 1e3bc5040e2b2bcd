"""HTTP itself: bodies, media types, problems, request ids."""
