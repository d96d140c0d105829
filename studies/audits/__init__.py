"""Audits of all included weights: see README.md."""
