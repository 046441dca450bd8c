"""Replays decisions on real hardware."""
