"""`python -m locks` is the command `locks`, for a checkout that is not installed."""

from locks.cli import app

if __name__ == "__main__":
    app(prog_name="locks")
