"""`python -m precondattn` is the command `precondattn`."""

from precondattn.command_line.cli import main

if __name__ == "__main__":
    main()
