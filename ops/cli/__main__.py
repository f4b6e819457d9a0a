"""Starts `sluice`, also as `python -m ops.cli`."""

import os
import sys

from ops.cli.interrupts import ended_by_ctrl_c


def main() -> None:
    open_closed_streams()
    with ended_by_ctrl_c():
        from ops.cli.main import main as run
    run()


def open_closed_streams() -> None:
    """Open /dev/null, for children too, as each standard stream that was closed: Python's is then None."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest free number: that of the stream
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8"))


if __name__ == "__main__":
    main()
