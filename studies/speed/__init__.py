"""Benchmarks of training, evaluation and prediction."""
