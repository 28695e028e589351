"""``python -m ckpt`` is the command ``ckpt``."""

from ckpt.cli import main

if __name__ == "__main__":
    main()
