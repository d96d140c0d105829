"""The few-shot methods, one file each; TRIDENT is a folder."""
