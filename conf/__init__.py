"""Configuration files, read by Hydra as pkg://conf."""
