"""`python -m trident` is the `trident` command."""

from trident.cli import main

if __name__ == "__main__":
    main()
