"""What a trained model can do: accuracy, audits, calibration, and a look at its latents."""
