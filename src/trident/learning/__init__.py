"""How methods learn: the outer loop, the inner loop with the exact meta-gradient, checkpoints and logs."""
