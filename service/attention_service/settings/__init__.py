"""The configuration of the service, and checks of the files that it names."""

from attention_service.settings.model import Settings, effective, load_settings, table, unknown_variables

__all__ = ["Settings", "effective", "load_settings", "table", "unknown_variables"]
