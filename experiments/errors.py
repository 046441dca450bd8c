"""What a command line or a call can ask for wrongly, beside what traces, policies and profiles refuse themselves."""


class ConfigError(ValueError):
    """A key of the configuration is missing or cannot be used so; the message says which and what is allowed."""
