"""Weights of the methods of trident's leaderboard. `trident weights` lists them once this package is installed."""
