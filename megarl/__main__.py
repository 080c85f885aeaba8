"""`python -m megarl`: the same command line as `megarl`."""

from megarl.cli import main

if __name__ == "__main__":
    main()
