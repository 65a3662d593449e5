"""``tilestream`` and ``python -m tilestream``: Ctrl-C is minded before anything large is imported."""

from tilestream import interrupts


def main() -> None:
    """The console script."""
    interrupts.install()
    try:
        from tilestream.cli.main import app

        app()
    except KeyboardInterrupt:
        interrupts.end()
    except SystemExit as done:
        if done.code == interrupts.EXIT_CODE or interrupts.seen():
            interrupts.end()
        raise


if __name__ == "__main__":
    main()
