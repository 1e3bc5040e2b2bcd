"""The version of the service, and the one model that the inference protocol names, each in its one place."""

__version__ = "0.1.0"
MODEL = "attention"
MODEL_VERSION = "1"
