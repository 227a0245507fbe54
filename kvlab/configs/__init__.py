"""Hydra configs: one folder a group, one file an option."""
