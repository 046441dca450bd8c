"""Command lines, configuration, results, metrics and figures: the only place that builds objects from settings."""
