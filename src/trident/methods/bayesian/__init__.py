"""Methods with a posterior over class means, weights or functions, on features."""
