"""Who answers: one file for each few-shot method; TRIDENT is a folder."""
