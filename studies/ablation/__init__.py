"""What each part of TRIDENT is worth: see README.md."""
