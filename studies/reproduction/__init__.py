"""The tables and figures of the TRIDENT paper, run again.

`panels.toml` lists them with the models that each needs. `running.py` trains and measures what is missing and keeps it
as JSON in `results/`; the document and the page are made from these files and from the paper's figures alone.
"""
