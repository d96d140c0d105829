"""Grids of training runs from TOML files.

`files.py` reads them, `grid.py` makes the cells, `running.py` trains them one by one, `on_cluster.py` on a Ray cluster.
"""
