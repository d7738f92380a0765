"""`python -m weightsync.cli`, for when the `weightsync` script is not on the PATH."""

from weightsync.cli.application import main

main()
