"""`python -m ibnn` is the command `ibnn`."""

from ibnn.app.cli import main

if __name__ == "__main__":
    main()
