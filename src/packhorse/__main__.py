"""`python -m packhorse`."""

from packhorse.cli.app import main

main()
