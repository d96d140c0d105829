"""TRIDENT. Read `network.py` for Algorithm 1 of the paper, `objective.py` for the loss, `settings.py` for the rest."""
