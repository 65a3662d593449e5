"""``python -m tilestream`` is the ``tilestream`` command."""

from tilestream.cli import main

main()
