"""Labels a pile of pictures from a few labelled ones."""
