"""`kvasir-rt` from its first moment: Ctrl-C ends it quietly while modules are still being read."""

import signal


def main() -> None:
    """The console script."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Nothing is to be cleaned up yet, and out of an import an exception may come as anything.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from kvasir_rt.cli import main as run

    run()


if __name__ == "__main__":
    main()
