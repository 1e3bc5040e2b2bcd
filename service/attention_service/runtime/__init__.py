"""The process and the machine that it runs on."""
