"""The command line as a program; Ctrl-C is handled before any slow import."""

import os
import signal


def main() -> None:
    """Run the command line; at any time, Ctrl-C ends it with one sentence."""
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a shell may have set it to be ignored
    if heeded:
        signal.signal(signal.SIGINT, _stop)
    from foretrace.commands import main as run  # Ctrl-C during this import is already handled

    try:
        if heeded:  # commands must be able to clean up their files
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run()
    except KeyboardInterrupt:
        _stop()
    finally:
        if heeded:
            signal.signal(signal.SIGINT, _stop)


def _stop(*_: object) -> None:
    """End at once, because modules that are partly imported or partly shut down would print tracebacks."""
    try:
        os.write(2, b"foretrace: Interrupted.\n")
    finally:
        os._exit(130)


if __name__ == "__main__":
    main()
