"""`python -m stretto`."""

from stretto_lab.program import run

if __name__ == "__main__":
    run()
