"""`python -m ibnn` is the command `ibnn`."""

from ibnn.cli import main

if __name__ == "__main__":
    main()
