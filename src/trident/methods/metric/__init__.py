"""Methods that classify each query alone, by distances to classes or by a classifier fitted to the examples."""
