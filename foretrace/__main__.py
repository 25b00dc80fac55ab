"""``python -m foretrace``: the command line."""

from graph_predictor.cli import main

if __name__ == "__main__":
    main()
