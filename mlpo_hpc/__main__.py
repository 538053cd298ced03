"""``python -m mlpo_hpc`` is ``mlpo``."""

from mlpo_hpc.cli import main

if __name__ == "__main__":
    main(prog_name="mlpo")
