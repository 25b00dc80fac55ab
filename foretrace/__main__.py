"""``python -m foretrace``: the command line."""

from foretrace.commands import main

if __name__ == "__main__":
    main()
