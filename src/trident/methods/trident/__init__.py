"""TRIDENT: its network, its loss terms and its settings."""
