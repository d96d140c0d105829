"""Speed: how long a meta-iteration and an evaluation take, measured against a plain loop in the same run."""
