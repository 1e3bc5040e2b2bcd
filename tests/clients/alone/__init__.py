"""Tests that need a separate process: the messages of tritonclient and kserve have the same names."""
