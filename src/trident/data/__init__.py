"""Datasets: readers for their public forms, the packed store they are turned into, and the embedded glyphs."""
