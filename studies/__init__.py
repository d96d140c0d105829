"""What was measured with the package. Each study is a folder with its list, its results and one command.

Run it in the top folder of a clone of the repository: `python -m studies.NAME --help`.
"""
