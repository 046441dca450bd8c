"""Executes decisions on real hardware, and measures what it costs there."""
