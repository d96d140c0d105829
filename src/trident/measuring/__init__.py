"""Measures trained models: accuracy, audits, calibration and latents."""
