"""Datasets: readers for their published formats, the packed store, and the embedded glyphs."""
