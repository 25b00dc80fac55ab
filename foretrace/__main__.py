"""The command line as a program: ready for Ctrl-C before it imports anything that takes time."""

import os
import signal


def main() -> None:
    """Run the command line, which Ctrl-C ends in one sentence at any time."""
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a shell may have it ignored
    if heeded:
        signal.signal(signal.SIGINT, _stop)
    from foretrace.commands import main as run  # an interruption of it is answered by now

    try:
        if heeded:  # commands have files to put away
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run()
    except KeyboardInterrupt:
        _stop()
    finally:
        if heeded:
            signal.signal(signal.SIGINT, _stop)


def _stop(*_: object) -> None:
    """End at once: modules that are being imported or taken down would print where they were."""
    try:
        os.write(2, b"foretrace: Interrupted.\n")
    finally:
        os._exit(130)


if __name__ == "__main__":
    main()
