"""What needs a process of its own: messages of tritonclient have the names of those of kserve."""
