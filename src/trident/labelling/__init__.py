"""A few labelled pictures and a pile of others in, labels out."""
