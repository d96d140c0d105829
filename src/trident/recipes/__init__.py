"""Recipes: one TOML file per trained model. `files.py` finds them, `loading.py` reads and checks them."""
